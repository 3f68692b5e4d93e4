"""Stage 3: the same text as stage 1, at a price per token that stays flat; and what the memory for it costs."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import time

import numpy as np

from common import cli, report
from common.checkpoint import load
from common.config import DUMMY_MODELS, UserError
from common.tokenizer import load_tokenizer
from stage1_naive.generate import generate
from stage2_req.params import SamplingParams
from stage2_req.trace import TracedRunner
from stage3_kvcache.build import build_engine


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--prompt", default="Explain in detail how rain forms.", help="what to ask (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of the answer (default: %(default)s)")
    args = parser.parse_args()
    if args.max_tokens < 8:
        raise UserError("--max-tokens needs 8 or more to show a trend")
    data = {"race": race(args), "memory": memory()}
    if args.save:
        report.save(__file__, "", args, data)
        draw(data["race"])


def race(args) -> dict:
    """Stage 1 against this stage, on the same prompt."""
    tokenizer = load_tokenizer(args.model)
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}]) if tokenizer else list(range(1, 33))

    report.heading("With a cache: prefill once, then one new position per step")
    engine = build_engine(cli.config(args))
    engine.runner = trace = TracedRunner(engine.runner)
    engine.generate([prompt], SamplingParams(max_tokens=2))  # warm
    trace.clear()
    engine.add(prompt, SamplingParams(max_tokens=args.max_tokens))
    stamps, tokens = [time.perf_counter()], []
    while engine.has_work():
        tokens += [output.token_id for output in engine.step()]
        stamps.append(time.perf_counter())
    cached = np.diff(stamps) * 1e3
    if tokenizer:
        report.say(tokenizer.decode(tokens) + "\n")
    rows = [[r.step, r.cached_len, r.device_len, r.extend_len] for r in trace.rows[:4]]
    report.table("The first steps", ["step", "cached_len", "device_len", "extend_len"], rows)

    report.heading("Stage 1 on the same prompt")
    m = load(cli.config(args))
    stamps, again = [time.perf_counter()], []
    for token in generate(m.model, m.kernels, prompt, args.max_tokens):
        again.append(token)
        stamps.append(time.perf_counter())
    naive = np.diff(stamps) * 1e3
    report.say(f"same {len(tokens)} tokens: {'yes' if tokens == again else 'NO'}\n")

    quarter = max(1, len(naive) // 4)
    table = [
        [
            name,
            round(times[0]),
            round(float(np.median(times[1 : 1 + quarter]))),
            round(float(np.median(times[-quarter:]))),
            round(times.sum() / 1e3, 2),
        ]
        for name, times in (("stage 1", naive), ("stage 3", cached))
    ]
    table.append(
        ["stage 1 / stage 3", *(round(a / max(b, 1e-9), 1) for a, b in zip(table[0][1:], table[1][1:], strict=True))]
    )
    report.table("Milliseconds per token", ["", "first token", "first quarter", "last quarter", "all, seconds"], table)
    return {
        "table": table,
        "naive_ms": naive.round(1).tolist(),
        "cached_ms": cached.round(1).tolist(),
        "same": tokens == again,
    }


def memory() -> list:
    report.heading("What it costs: 2 x layers x KV heads x head size x bytes, per token")
    rows = []
    for name, heads, label in (
        ("smollm2-135m", None, "as it is"),
        ("llama3-8b", 32, "if every query head had its K and V"),
        ("llama3-8b", None, "as it is"),
    ):
        shape = DUMMY_MODELS[name]
        heads = heads or shape.num_kv_heads
        token = shape.kv_bytes_per_token(2) * heads // shape.num_kv_heads
        rows.append(
            [name, label, heads, round(token / 1024, 1), round(token * 4096 / 2**30, 2), int(80e9 // (token * 4096))]
        )
    report.table(
        "bfloat16", ["model", "", "KV heads", "KiB per token", "GiB for 4,096 tokens", "such requests in 80 GB"], rows
    )
    return rows


def draw(race: dict) -> None:
    with report.plot(__file__, "flat", "Time of each token", "token of the answer", "milliseconds") as axes:
        axes.plot(race["naive_ms"], color=report.COLOURS[3], label="stage 1: everything again")
        axes.plot(race["cached_ms"], color=report.COLOURS[0], label="stage 3: cached")
        axes.set_ylim(0)


if __name__ == "__main__":
    cli.run(main)
