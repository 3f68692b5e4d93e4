"""The host's share of a step: everything but the model, at 256 running requests. The model is a stub that costs nothing.

python stage5_paged/bench_host.py
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine

PARTS = ("schedule", "look up ids", "plan attention", "sample", "commit", "update")


class StubModel:
    """Answers with fixed logits; calls no attention."""

    def __init__(self, max_tokens: int, vocab_size: int = 16):
        self.hidden, self.logits = torch.zeros(max_tokens, 1), torch.randn(max_tokens, vocab_size)

    def __call__(self, input_ids, positions, attention):
        return self.hidden[: len(input_ids)]

    def head(self, hidden):
        return self.logits[: len(hidden)]


def main() -> None:
    parser = cli.parser(__doc__, flags=("save",))
    parser.add_argument("--running", type=int, default=256, help="requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="steps to time (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(page_size, args.running, args.steps) for page_size in (1, 16)]
    report.table(
        f"Microseconds per step on the host, {args.running} requests decoding (median)",
        ["page size", "whole step", *PARTS],
        rows,
    )
    if args.save:
        report.save(__file__, "host", args, {"columns": ["page size", "whole step", *PARTS], "rows": rows})


def measure(page_size: int, running: int, steps: int) -> list:
    longest = 64 + steps
    config = cli.EngineConfig(
        model="dummy:tiny",
        device="cpu",
        max_model_len=longest,
        max_running=running,
        max_batch_tokens=running * 32,
        page_size=page_size,
        kv_tokens=running * longest // page_size * page_size,
    )
    engine = build_engine(config)
    engine.runner.model = StubModel(running * 32)
    for i in range(running):
        engine.add([i % 500] * 30, SamplingParams(max_tokens=steps + 20, ignore_eos=True))
    for _ in range(10):
        engine.step()
    whole, parts = [], {part: [] for part in PARTS}

    def timed(owner, method: str, part: str):
        inner = getattr(owner, method)

        def outer(*args):
            start = time.perf_counter()
            result = inner(*args)
            parts[part].append(time.perf_counter() - start)
            return result

        setattr(owner, method, outer)

    for _ in range(steps // 2):  # the whole step first, undisturbed by the clocks inside
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
    timed(engine.scheduler, "schedule", "schedule")
    timed(engine.runner, "input_ids", "look up ids")
    timed(engine.runner.attention, "plan", "plan attention")
    timed(engine.runner, "sampler", "sample")
    timed(engine.cache, "commit", "commit")
    timed(engine.scheduler, "update", "update")
    for _ in range(steps // 2):
        engine.step()
    return [page_size, *(round(float(np.median(times)) * 1e6) for times in (whole, *parts.values()))]


if __name__ == "__main__":
    cli.run(main)
