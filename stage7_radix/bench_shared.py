"""Many requests on a few long system prompts: throughput and time to first token, with and without the prefix cache.

python stage7_radix/bench_shared.py --model dummy:qwen3-0.6b
"""

import gc
import sys
import time
from collections import deque
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report, workload
from common.config import UserError
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage6_cudagraph.bench_offline import ENGINE_FLAGS
from stage7_radix.build import build_engine

REQUESTS, GROUPS, PREFIX, QUESTION, ANSWER = 256, 8, 2048, 64, 128
COLUMNS = ["cache", "hit rate, %", "seconds", "output tokens/s", "prompt tokens/s", "TTFT p50, ms", "p99"]


def main() -> None:
    parser = cli.parser(__doc__, *ENGINE_FLAGS)
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and number of requests (default: 1)")
    parser.add_argument("--rate", type=float, help="requests per second that arrive (default: all at once)")
    parser.add_argument("--rounds", type=int, default=2, help="runs, each on new prompts; all are shown (default: 2)")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        raise UserError("--scale takes a number above 0 and at most 1")
    if args.rate is not None and args.rate <= 0:
        raise UserError("--rate takes a number above 0")
    per_group, prefix, question, answer = (
        max(1, round(n * args.scale)) for n in (REQUESTS // GROUPS, PREFIX, QUESTION, ANSWER)
    )
    rows = []
    for way in ("off", "on"):
        engine = build_engine(cli.config(args, radix=way == "on"))
        engine.generate([[1] * 8] * 8, SamplingParams(temperature=0.6, max_tokens=8))  # warm
        for seed in range(args.rounds):
            items = workload.shared_prefix(GROUPS, per_group, prefix, question, answer, engine.model.vocab_size, seed)
            arrivals = workload.online(len(items), args.rate, seed) if args.rate else [0.0] * len(items)
            rows.append([way, *serve(engine, items, arrivals)])
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shape = f"{GROUPS * per_group} requests in {GROUPS} groups, prefixes of {prefix:,}, questions of {question}, {answer} new tokens each"
    report.table(f"{args.model}: {shape}", COLUMNS, rows)
    if args.save:
        report.save(__file__, "shared", args, {"shape": shape, "columns": COLUMNS, "rows": rows})


def serve(engine: Engine, items: list[workload.Item], arrivals: list[float]) -> list:
    """Let the requests arrive on time and run them to their end; a row of numbers."""
    todo, arrived, reqs = deque(zip(arrivals, items, strict=True)), {}, {}
    start = time.perf_counter()
    while todo or engine.has_work():
        while todo and todo[0][0] <= time.perf_counter() - start:
            at, item = todo.popleft()
            params = SamplingParams(temperature=0.6, max_tokens=item.max_tokens, ignore_eos=True)
            arrived[engine.add(item.prompt_ids, params)] = start + at
        if engine.has_work():
            reqs |= {output.uid: output.req for output in engine.step()}
        else:
            time.sleep(max(0.0, start + todo[0][0] - time.perf_counter()))
    seconds = time.perf_counter() - start
    prompt, out = sum(len(item.prompt_ids) for item in items), sum(item.max_tokens for item in items)
    hits = sum(req.cached_tokens or 0 for req in reqs.values())
    p50, p99 = np.percentile([req.first_token_at - arrived[uid] for uid, req in reqs.items()], (50, 99)) * 1e3
    rates = [round(100 * hits / prompt, 1), round(seconds, 2), round(out / seconds), round(prompt / seconds)]
    return [*rates, round(p50), round(p99)]


if __name__ == "__main__":
    cli.run(main)
