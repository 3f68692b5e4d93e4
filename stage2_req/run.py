"""Stage 2: several requests with different wishes through one frame, and the three lengths of each, step by step."""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import cli, report
from common.tokenizer import load_tokenizer
from stage2_req.build import build_engine
from stage2_req.params import SamplingParams
from stage2_req.req import Req
from stage2_req.sampling import GumbelSampler
from stage2_req.trace import TracedRunner

REQUESTS = {  # what is asked for: (prompt, params)
    "greedy": ("What is the capital of France?", {}),
    "seed 7, temperature 0.9": ("Name a colour.", {"temperature": 0.9, "seed": 7}),
    "the same again": ("Name a colour.", {"temperature": 0.9, "seed": 7}),
    "top_p 0.8, presence 1": (
        "Name three animals.",
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 1.0, "seed": 1},
    ),
    "2 logprobs": ("Is water wet? Answer yes or no.", {"logprobs": 2, "max_tokens": 3}),
}


def main() -> None:
    args = cli.parser(__doc__).parse_args()
    engine, tokenizer = build_engine(cli.config(args)), load_tokenizer(args.model)
    engine.runner = trace = TracedRunner(engine.runner)

    report.heading("Requests with different wishes, one after the other")
    prompts = [
        tokenizer.chat([{"role": "user", "content": text}]) if tokenizer else [1, 2, 3, 4]
        for text, _ in REQUESTS.values()
    ]
    reqs = engine.generate(prompts, [SamplingParams(**{"max_tokens": 8, **extra}) for _, extra in REQUESTS.values()])
    rows = []
    for name, req in zip(REQUESTS, reqs, strict=True):
        text = tokenizer.decode(req.output_ids) if tokenizer else str(req.output_ids)
        rows.append([req.uid, name, len(req.output_ids), req.finish_reason, text.replace("\n", "⏎")])
    report.table("", ["uid", "asked for", "tokens", "ended by", "text"], rows)
    show_logprobs(reqs[-1], tokenizer)

    first = [row for row in trace.rows if row.uid == 0]
    report.table(
        "Request 0: nothing is kept, so every step computes all positions again",
        ["step", "cached_len", "device_len", "extend_len"],
        [[row.step, row.cached_len, row.device_len, row.extend_len] for row in first],
    )
    useful = sum(len(req.token_ids) - 1 for req in reqs)
    computed = engine.stats().computed_tokens
    report.say(
        f"{computed:,} positions computed where {useful:,} would have done: {computed / useful:.1f} times as many.\n"
    )
    fast = greedy_fast_path(engine.device)
    if args.save:
        data = {
            "requests": rows,
            "trace": [list(row) for row in first],
            "computed": computed,
            "useful": useful,
            "greedy": fast,
        }
        report.save(__file__, "", args, data)


def show_logprobs(req: Req, tokenizer) -> None:
    def name(token: int) -> str:
        return repr(tokenizer.decode([token], skip_special=False)) if tokenizer else str(token)

    rows = []
    for token, entry in zip(req.output_ids, req.logprobs, strict=True):
        rivals = ", ".join(f"{name(rival)} {value:.2f}" for rival, value in entry.top)
        rows.append([name(token), round(entry.chosen, 2), rivals])
    report.table(
        "How sure the model was (natural logarithm of the probability)", ["token", "logprob", "likeliest"], rows
    )


def greedy_fast_path(device: torch.device, size: int = 32, vocab_size: int = 49152) -> dict:
    """Milliseconds of the sampler for a batch, with the fast path and without."""
    logits = torch.randn(size, vocab_size, device=device)
    result = {}
    for name, params in (("all greedy: one argmax", {}), ("temperature 1: a draw", {"temperature": 1.0})):
        reqs = [Req(i, [1], SamplingParams(**params), i, 100, frozenset()) for i in range(size)]
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            GumbelSampler()(logits, reqs).to_host()
            best = min(best, time.perf_counter() - start)
        result[name] = round(best * 1e3, 2)
    report.table(f"The sampler on {size} x {vocab_size:,} logits", ["path", "ms"], list(result.items()))
    return result


if __name__ == "__main__":
    cli.run(main)
