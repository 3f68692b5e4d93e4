"""Stage 1: a real answer from a real model, one full pass per token; then what that costs.

The article's toy generates 64 tokens with and without a cache: seconds measured, FLOPs counted exactly up to 1000.
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report
from common.checkpoint import load
from common.config import UserError
from common.device import resolve_device, synchronize
from common.tokenizer import IncrementalDecoder, load_tokenizer
from stage1_naive import toy
from stage1_naive.generate import generate

LENGTHS = (64, 125, 250, 500, 1000)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--prompt", default="Why is the sky blue?", help="what to ask (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of the answer (default: %(default)s)")
    parser.add_argument(
        "--toy-tokens", type=int, default=64, help="tokens that the toy generates (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.max_tokens < 1 or args.toy_tokens < 2:
        raise UserError("--max-tokens needs 1 or more, --toy-tokens 2 or more")
    data = {"answer": answer(args), "toy": run_toy(args), "flops": count_flops()}
    if args.save:
        report.save(__file__, "", args, data)
        draw(data["flops"])


def answer(args) -> dict:
    report.heading("A real model, one full pass for every token")
    m, tokenizer = load(cli.config(args)), load_tokenizer(args.model)
    if not args.prompt.strip():
        raise UserError("--prompt is empty; ask something")
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}]) if tokenizer else list(range(1, 33))
    if len(prompt) + args.max_tokens > m.config.max_model_len:
        raise UserError(
            f"prompt and answer together are {len(prompt) + args.max_tokens} tokens; the limit is {m.config.max_model_len}"
        )
    report.say(f"{args.model}, {m.dtype}, {m.device}; the prompt has {len(prompt)} tokens. {args.prompt}\n")
    decoder = IncrementalDecoder(tokenizer) if tokenizer else None
    stamps = [time.perf_counter()]
    for token in generate(m.model, m.kernels, prompt, args.max_tokens):
        stamps.append(time.perf_counter())
        print(decoder.push(token) if decoder else f"{token} ", end="", flush=True)
    print((decoder.flush() if decoder else "") + "\n")
    gaps = np.diff(stamps) * 1e3
    report.say(f"{len(gaps)} tokens, {gaps.mean():.0f} ms each; every one ran the whole text again.")
    return {"prompt_tokens": len(prompt), "ms_per_token": gaps.round(1).tolist()}


def run_toy(args) -> dict:
    report.heading(f"The toy: 2 layers, hidden 4096, prompt 32, {args.toy_tokens} new tokens")
    device = resolve_device(args.device)
    torch.manual_seed(42)
    model, prompt = toy.DemoGPT().to(device).eval(), torch.randint(0, toy.VOCAB, (32,)).to(device)
    seconds, outputs = {}, {}
    for kind, way in (("cached", toy.generate_cached), ("naive", toy.generate_naive)):
        way(model, prompt, 2)  # warm
        synchronize(device)
        start = time.perf_counter()
        outputs[kind] = way(model, prompt, args.toy_tokens)
        synchronize(device)
        seconds[kind] = time.perf_counter() - start
    flops = {kind: toy.count_generation(32, args.toy_tokens, kind == "cached").total for kind in seconds}
    rows = [[kind, round(seconds[kind], 2), round(flops[kind] / 1e9, 1)] for kind in ("naive", "cached")]
    rows.append(["naive / cached", *(round(x["naive"] / x["cached"], 1) for x in (seconds, flops))])
    report.table("Seconds and FLOPs are two things", ["way", "seconds", "GFLOP"], rows)
    same = torch.equal(outputs["naive"], outputs["cached"])
    report.say(
        f"same tokens: {'yes' if same else 'no'}. A cached step reads every weight for one token: memory sets its time, not FLOPs."
    )
    return {"seconds": seconds, "flops": flops, "same_tokens": same}


def count_flops() -> dict:
    report.heading("Exact FLOPs of the toy, prompt 32")
    counts = {kind: [toy.count_generation(32, n, kind == "cached") for n in LENGTHS] for kind in ("naive", "cached")}
    rows = []
    for n, naive, cached in zip(LENGTHS, *counts.values(), strict=True):
        rows.append(
            [
                n,
                round(naive.total / 1e9),
                round(cached.total / 1e9),
                round(naive.total / cached.total),
                round(100 * naive.attention / naive.total, 1),
            ]
        )
    report.table("", ["new tokens", "naive GFLOP", "cached GFLOP", "ratio", "attention's share of naive, %"], rows)
    fine = np.arange(200, 1001, 100)
    exponents = {}
    for kind in counts:
        for term in ("projections", "attention", "total"):
            values = [getattr(toy.count_generation(32, int(n), kind == "cached"), term) for n in fine]
            exponents[f"{kind} {term}"] = round(float(np.polyfit(np.log(fine), np.log(values), 1)[0]), 2)
    report.table("Fitted exponents, 200 to 1000 new tokens", ["term", "grows like N to the"], list(exponents.items()))
    return {"lengths": LENGTHS, "rows": rows, "exponents": exponents}


def draw(flops: dict) -> None:
    fine = np.unique(np.geomspace(8, 16000, 60).astype(int))
    with report.plot(__file__, "flops", "Work to generate N tokens (toy, prompt 32)", "new tokens N", "FLOPs") as axes:
        for kind, colour in (("naive", report.COLOURS[3]), ("cached", report.COLOURS[0])):
            counts = [toy.count_generation(32, int(n), kind == "cached") for n in fine]
            axes.loglog(fine, [c.total for c in counts], color=colour, label=kind)
            axes.loglog(
                fine, [c.attention for c in counts], color=colour, linestyle=":", label=f"{kind}, attention only"
            )


if __name__ == "__main__":
    cli.run(main)
