"""Stage 1 against stage 3 at growing lengths: seconds, and exact FLOPs of the real model. Takes minutes.

python stage3_kvcache/bench_naive.py --save
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.utils.flop_counter import FlopCounterMode

from common import cli, report
from common.checkpoint import empty_model, load
from common.config import ModelConfig
from common.kernels import portable
from stage1_naive.generate import generate
from stage2_req.params import SamplingParams
from stage3_kvcache.build import build_engine

COLUMNS = [
    "new tokens",
    "stage 1, s",
    "stage 3, s",
    "ratio",
    "stage 1 GFLOP",
    "stage 3 GFLOP",
    "ratio of FLOPs",
    "same tokens",
]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="new tokens (default: 64 128 256 512)"
    )
    args = parser.parse_args()
    prompt = list(range(100, 132))
    engine, m = build_engine(cli.config(args)), load(cli.config(args))
    count = flop_counter(m.model.config)
    rows = []
    for new in args.lengths:
        tokens, seconds = [], []
        for run in (
            lambda new=new: list(generate(m.model, m.kernels, prompt, new)),
            lambda new=new: engine.generate([prompt], SamplingParams(max_tokens=new))[0].output_ids,
        ):
            start = time.perf_counter()
            tokens.append(run())
            seconds.append(time.perf_counter() - start)
        made = len(tokens[1])
        naive = sum(count(len(prompt) + k, 0) for k in range(made))
        cached = count(len(prompt), 0) + sum(count(1, len(prompt) + k) for k in range(made - 1))
        same = "yes" if tokens[0] == tokens[1] else "no"
        row = [made, round(seconds[0], 1), round(seconds[1], 1), round(seconds[0] / seconds[1], 1)]
        rows.append([*row, round(naive / 1e9), round(cached / 1e9), round(naive / cached, 1), same])
        report.say(f"{made} tokens: {seconds[0]:.0f} s against {seconds[1]:.0f} s")
    report.table("Prompt of 32 tokens", COLUMNS, rows)
    if args.save:
        report.save(__file__, "naive", args, {"columns": COLUMNS, "rows": rows})
        with report.plot(__file__, "naive", "A whole generation", "new tokens", "ratio, stage 1 / stage 3") as axes:
            axes.plot([row[0] for row in rows], [row[6] for row in rows], marker="o", label="FLOPs (exact)")
            axes.plot([row[0] for row in rows], [row[3] for row in rows], marker="o", label="seconds")


def flop_counter(config: ModelConfig):
    """count(new, past): exact FLOPs of one pass, head of the last row included.

    PyTorch counts the matrix products of a pass without data (device `meta`). For a given model they are
    a * new + b * new * (past + new) + c, so three counts settle all.
    """
    model = empty_model(config, torch.device("meta"), torch.float32)
    model.init_rope(64, torch.device("meta"))

    def measure(new: int, past: int) -> int:
        def attention(layer, q, k, v):
            keys = [torch.cat((t.new_zeros(past, *t.shape[1:]), t)) for t in (k, v)]
            return portable.attend(q, *keys, causal=False)

        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            hidden = model(torch.zeros(new, dtype=torch.long), torch.zeros(new, dtype=torch.long), attention)
            model.head(hidden[-1:])
        return counter.get_total_flops()

    one, two, far = measure(1, 0), measure(2, 0), measure(1, 8)
    b = (far - one) // 8
    a = two - one - 3 * b
    c = one - a - b
    assert measure(5, 7) == a * 5 + b * 5 * 12 + c
    return lambda new, past: a * new + b * new * (past + new) + c


if __name__ == "__main__":
    cli.run(main)
