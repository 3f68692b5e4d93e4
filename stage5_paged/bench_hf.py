"""Throughput of many requests: this engine against Hugging Face `generate`, one by one and as a padded batch, in one run.

python stage5_paged/bench_hf.py
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import cli, report, workload
from common.config import UserError
from common.device import resolve_device, resolve_dtype
from common.fetch import resolve_model
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine


def main() -> None:
    parser = cli.parser(__doc__, "max_batch_tokens", "page_size")
    parser.add_argument("--requests", type=int, default=32, help="all at once (default: %(default)s)")
    parser.add_argument(
        "--alone", type=int, default=6, help="requests that are also run one by one (default: %(default)s)"
    )
    parser.add_argument(
        "--scale", type=float, default=1 / 16, help="of the offline workload's lengths (default: %(default)s)"
    )
    args = parser.parse_args()
    if not 1 <= args.alone <= args.requests <= 256:
        raise UserError("--requests takes 1 to 256, --alone no more than that")
    rows = compare(args)
    report.table(
        f"{args.requests} requests, greedy, same lengths",
        ["way", "tokens", "seconds", "tokens/s", "this engine is x as fast"],
        rows,
    )
    if args.save:
        report.save(__file__, "hf", args, {"rows": rows})


def compare(args) -> list:
    from transformers import AutoModelForCausalLM

    engine = build_engine(cli.config(args, max_running=args.requests))
    device = resolve_device(args.device)
    hf = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model), trust_remote_code=False, dtype=resolve_dtype(args.dtype, device)
    ).to(device)
    items = workload.offline(args.scale, engine.model.vocab_size)[: args.requests]

    def run_ours():
        engine.generate(
            [i.prompt_ids for i in items], [SamplingParams(max_tokens=i.max_tokens, ignore_eos=True) for i in items]
        )

    def run_hf(batch):
        """Left-padded; ends with the longest answer, of which only what was asked for counts."""
        width, tokens = max(len(i.prompt_ids) for i in batch), max(i.max_tokens for i in batch)
        ids = torch.tensor([[0] * (width - len(i.prompt_ids)) + i.prompt_ids for i in batch], device=device)
        mask = torch.tensor([[0] * (width - len(i.prompt_ids)) + [1] * len(i.prompt_ids) for i in batch], device=device)
        hf.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    ways = {
        "Hugging Face, one by one": (items[: args.alone], lambda: [run_hf([item]) for item in items[: args.alone]]),
        "Hugging Face, padded batch": (items, lambda: run_hf(items)),
        "this engine": (items, run_ours),
    }
    run_hf(items[:1])
    engine.generate([items[0].prompt_ids], SamplingParams(max_tokens=2))  # warm
    rows = []
    for name, (batch, run) in ways.items():
        best = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
        tokens = sum(item.max_tokens for item in batch)
        rows.append([name, tokens, round(best, 1), round(tokens / best, 1)])
    return [[*row, round(rows[-1][3] / row[3], 1)] for row in rows]


if __name__ == "__main__":
    cli.run(main)
