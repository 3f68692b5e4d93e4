"""What each stage bought: the same requests, all at once, through the engine of every stage; output tokens/s and TTFT.

python -m stage9_server.ladder
"""

import asyncio
import importlib
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np

from common import cli, report, workload
from common.checkpoint import load, load_config
from common.config import EngineConfig, UserError
from common.device import resolve_device
from stage1_naive.generate import generate
from stage2_req.params import SamplingParams
from stage9_server import load as offered
from stage9_server import local_server
from stage9_server.client import completions

NAMES = {1: "naive", 2: "req", 3: "kvcache", 4: "batch", 5: "paged", 6: "cudagraph", 7: "radix", 8: "tp", 9: "server"}
IN_LINE = (1, 2, 3)  # stages that serve one request after the other
COLUMNS = ["stage", "requests run", "output tokens/s", "TTFT p50, ms"]
Timing = tuple[float, float, int]  # of a request: seconds to the first token, to the last, and output tokens


def main() -> None:
    parser = cli.parser(__doc__, *(flag for flag in local_server.ENGINE_FLAGS if flag not in (*cli.COMMON, "tp")))
    parser.add_argument("--scale", type=float, default=0.06, help="of the offline workload (default: %(default)s)")
    parser.add_argument(
        "--few", type=int, default=2, help="requests that the stages without batches run (default: %(default)s)"
    )
    args = parser.parse_args()
    if not 0 < args.scale <= 1 or args.few < 1:
        raise UserError("--scale takes a number above 0 and at most 1, --few one of at least 1")
    config, vocab_size = cli.config(args), load_config(args.model)[0].vocab_size
    items = workload.offline(args.scale, vocab_size)[: max(1, round(256 * args.scale))]
    context, rows = get_context("forkserver"), []
    context.set_forkserver_preload(["stage8_tp.build"])  # imports PyTorch once for all
    for stage, name in NAMES.items():
        report.say(f"stage {stage} ({name})")
        if stage == 9:
            rows.append([stage, len(items), *server(args, items)])
        else:
            count = min(args.few, len(items)) if stage in IN_LINE else len(items)
            with ProcessPoolExecutor(1, context) as pool:  # whose end frees the memory
                timings = pool.submit(run, config, stage, items[:count]).result()
            rows.append([stage, count, *summary(timings, len(items), stage in IN_LINE)])
    title = f"{args.model}: {len(items)} requests at once; those of stages 1 to 3 in line, extrapolated from a few"
    report.table(title, COLUMNS, rows)
    if args.save:
        report.save(__file__, "ladder", args, {"requests": len(items), "columns": COLUMNS, "rows": rows})
        draw(args, rows)


def run(config: EngineConfig, stage: int, items: list[workload.Item]) -> list[Timing]:
    """The requests through one stage's engine; on a GPU a second time, since the first one compiles kernels."""
    work = naive(config) if stage == 1 else engine(config, stage)
    one = items[0]
    work([replace(one, max_tokens=min(4, one.max_tokens))])
    if resolve_device(config.device).type == "cuda":
        work(items)
    return work(items)


def naive(config: EngineConfig) -> Callable[[list[workload.Item]], list[Timing]]:
    m = load(config)
    m.model.config = replace(m.model.config, eos_ids=frozenset())  # as many tokens as are asked for

    def work(items: list[workload.Item]) -> list[Timing]:
        timings = []
        for item in items:
            start = time.perf_counter()
            times = [
                time.perf_counter() - start for _ in generate(m.model, m.kernels, item.prompt_ids, item.max_tokens)
            ]
            timings.append((times[0], times[-1], len(times)))
        return timings

    return work


def engine(config: EngineConfig, stage: int) -> Callable[[list[workload.Item]], list[Timing]]:
    built = importlib.import_module(f"stage{stage}_{NAMES[stage]}.build").build_engine(config)

    def together(items: list[workload.Item]) -> list[Timing]:
        params = [SamplingParams(max_tokens=item.max_tokens, ignore_eos=True) for item in items]
        start = time.perf_counter()
        reqs = built.generate([item.prompt_ids for item in items], params)
        return [(req.first_token_at - start, req.finished_at - start, len(req.output_ids)) for req in reqs]

    def in_line(items: list[workload.Item]) -> list[Timing]:
        return [timing for item in items for timing in together([item])]

    return in_line if stage in IN_LINE else together


def summary(timings: list[Timing], requests: int, in_line: bool) -> tuple[float, float]:
    """(output tokens per second, median TTFT in ms). In line, the median request waits for half of the others."""
    first, last, tokens = np.array(timings).T
    if in_line:
        return round(tokens.sum() / last.sum(), 1), round(
            1e3 * float(first.mean() + last.mean() * (requests - 1) / 2), 1
        )
    return round(tokens.sum() / last.max(), 1), round(1e3 * float(np.median(first)), 1)


def server(args, items: list[workload.Item]) -> tuple[float, float]:
    """Stage 9: the same requests as streams of the running server."""
    with local_server.running(*local_server.as_flags(args), "--port", "0") as running:
        target = offered.Server(running.url)
        for salt in ("warm", "counts"):
            path, bodies = completions(args.model, items, 0.0, cache_salt=salt)
            result = offered.summarize(asyncio.run(offered.offer(target, path, bodies)))
    if result.failed:
        raise UserError(f"{result.failed} of {len(items)} streams failed; the server's output above says why")
    return round(result.throughput, 1), round(1e3 * float(np.median(result.latencies["TTFT"])), 1)


def draw(args, rows: list[list]) -> None:
    stages = [f"{row[0]}\n{NAMES[row[0]]}" for row in rows]
    name = f"ladder-{report.device_name()}"
    title = f"What each stage bought ({args.model}, {report.device_name()})"
    with report.plot(__file__, name, title, "stage", "output tokens/s") as axes:
        bars = axes.bar(stages, [row[2] for row in rows], color=report.COLOURS[0])
        axes.bar_label(bars, [f"{row[2]:,.0f}" for row in rows], fontsize=8)
        axes.set_yscale("log")
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", labelsize=8)
        right = axes.twinx()
        right.plot(stages, [row[3] / 1e3 for row in rows], "o-", color=report.COLOURS[3])
        right.set_yscale("log")
        right.set_ylabel("time to first token, p50, s", color=report.COLOURS[3])
        right.grid(visible=False)


if __name__ == "__main__":
    cli.run(main)
