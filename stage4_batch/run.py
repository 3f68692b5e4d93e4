"""Stage 4: what batching brings, and what a long prompt does to requests that are already being answered."""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report
from common.config import UserError
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage4_batch.build import build_engine

SIZES = (1, 2, 4, 8, 16, 32, 64)
STREAMS, CHUNK = 8, 128


def main() -> None:
    parser = cli.parser(__doc__, flags=("model", "device", "dtype", "attn", "seed", "save"))
    parser.add_argument(
        "--long-prompt", type=int, default=2000, help="tokens of the prompt that arrives (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.long_prompt < 2:
        raise UserError("--long-prompt needs 2 or more tokens")
    data = {"throughput": throughput(args), "gaps": gaps(args)}
    if args.save:
        report.save(__file__, "", args, data)
        draw(data)


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, min(vocab_size, 10000), length).tolist()


def throughput(args, steps: int = 8) -> list:
    report.heading("One step for many: decode throughput against batch size")
    engine = build_engine(cli.config(args, max_running=max(SIZES), max_model_len=32, max_batch_tokens=512))
    rows = []
    for size in SIZES:
        for i in range(size):
            engine.add(prompt(4, i, engine.model.vocab_size), SamplingParams(max_tokens=steps + 2, ignore_eos=True))
        while engine.stats().waiting:
            engine.step()
        times = []
        while engine.has_work():
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        step = float(np.median(times))
        rows.append(
            [
                size,
                round(step * 1e3, 1),
                round(size / step, 1),
                round(size / step / (rows[0][2] if rows else size / step), 1),
            ]
        )
    report.table("", ["requests", "ms per step", "tokens/s", "x one request"], rows)
    return rows


def gaps(args) -> dict:
    report.heading(f"{STREAMS} requests are being answered when a prompt of {args.long_prompt:,} tokens arrives")
    config = cli.config(args, max_running=STREAMS + 1, max_model_len=args.long_prompt + 64, max_batch_tokens=CHUNK)
    engine, result, rows = build_engine(config), {}, []
    for name, budget in (("whole", args.long_prompt + STREAMS), (f"with a budget of {CHUNK}", CHUNK)):
        engine.scheduler.budget = budget
        times, first = stream(engine, args.long_prompt)
        result[name] = {"ms": (np.array(times) * 1e3).round(1).tolist(), "first_token_s": round(first, 2)}
        p50, p99 = np.percentile(times, (50, 99)) * 1e3
        rows.append([name, round(p50), round(p99), round(max(times) * 1e3), round(first, 2)])
    columns = ["the prompt goes in", "gap p50, ms", "p99", "longest", "first token of the newcomer, s"]
    report.table(f"Gaps between the tokens of the {STREAMS} requests", columns, rows)
    return {"rows": rows, "runs": result}


def stream(engine: Engine, long_prompt: int) -> tuple[list[float], float]:
    """Seconds between the steps that gave the running requests a token, and until the newcomer's first token."""
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    running = [engine.add(prompt(8, i, engine.model.vocab_size), params) for i in range(STREAMS)]
    for _ in range(6):
        engine.step()
    newcomer = engine.add(prompt(long_prompt, 99, engine.model.vocab_size), SamplingParams(max_tokens=1))
    start = last = time.perf_counter()
    gaps, first = [], None
    while engine.has_work():
        uids = [output.uid for output in engine.step()]
        now = time.perf_counter()
        if newcomer in uids:
            first = now - start
        if running[0] in uids:
            gaps.append(now - last)
            last = now
    return gaps, first


def draw(data: dict) -> None:
    with report.plot(__file__, "throughput", "Decode throughput", "requests in the batch", "tokens per second") as axes:
        axes.plot([row[0] for row in data["throughput"]], [row[2] for row in data["throughput"]], marker="o")
        axes.set_xscale("log", base=2)
        axes.set(xticks=SIZES, xticklabels=SIZES, ylim=0)


if __name__ == "__main__":
    cli.run(main)
