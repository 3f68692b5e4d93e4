"""The `offline` workload, once in the engine alone and once through the server, as so many streams at the same time.

python stage9_server/bench_online.py --model dummy:qwen3-0.6b --max-model-len 4096
"""

import asyncio
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import cli, report, workload
from common.checkpoint import load_config
from common.config import EngineConfig, UserError
from common.device import synchronize
from stage2_req.engine import Engine
from stage7_radix.params import RequestParams
from stage8_tp.build import build_engine
from stage9_server import launch, load
from stage9_server.client import completions

COLUMNS = ["way", "round", "requests", "output tokens", "seconds", "output tokens/s"]
TEMPERATURE = 0.6


def main() -> None:
    parser = cli.parser(__doc__, *(flag for flag in launch.ENGINE_FLAGS if flag not in (*cli.COMMON, "tp")))
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and number of requests (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="of each; the last one counts (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.scale <= 1 or args.rounds < 1:
        raise UserError("--scale takes a number above 0 and at most 1, --rounds one of at least 1")
    vocab_size = load_config(args.model)[0].vocab_size
    items = workload.offline(args.scale, vocab_size)[: max(1, round(256 * args.scale))]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose end frees the device's memory
        rows = pool.submit(offline, cli.config(args), items, args.rounds).result()
    with launch.running(*launch.as_flags(args), "--port", "0", "--max-queue", str(len(items))) as server:
        summaries = online(server.url, args.model, items, args.rounds)
    rows += [row("online", i, len(items), s.output_tokens, s.seconds) for i, s in enumerate(summaries, 1)]
    percent = round(100 * rows[-1][-1] / rows[args.rounds - 1][-1], 1)
    report.table(f"{args.model}, {len(items)} requests at once", COLUMNS, rows)
    report.table("Online, the last round", load.COLUMNS, summaries[-1].rows)
    report.say(f"online / offline: {percent} %")
    if args.save:
        latency = {"columns": load.COLUMNS, "rows": summaries[-1].rows}
        data = {"columns": COLUMNS, "rows": rows, "latency": latency, "online / offline, %": percent}
        report.save(__file__, "online", args, data)


def row(way: str, number: int, requests: int, tokens: int, seconds: float) -> list:
    return [way, number, requests, tokens, round(seconds, 2), round(tokens / seconds, 1)]


def offline(config: EngineConfig, items: list[workload.Item], rounds: int) -> list[list]:
    engine = build_engine(config)
    return [row("offline", i, *generate(engine, items, f"round {i}")) for i in range(1, rounds + 1)]


def generate(engine: Engine, items: list[workload.Item], salt: str) -> tuple[int, int, float]:
    """(requests, output tokens, seconds). The salt keeps a round from finding the last one's prefixes."""
    more = {"temperature": TEMPERATURE, "ignore_eos": True, "cache_salt": salt}
    params = [RequestParams(max_tokens=item.max_tokens, **more) for item in items]
    synchronize(engine.device)
    start = time.perf_counter()
    reqs = engine.generate([item.prompt_ids for item in items], params)
    return len(reqs), sum(len(req.output_ids) for req in reqs), time.perf_counter() - start


def online(url: str, model: str, items: list[workload.Item], rounds: int) -> list[load.Summary]:
    server, summaries = load.Server(url), []
    for i in range(1, rounds + 1):
        path, bodies = completions(model, items, TEMPERATURE, cache_salt=f"round {i}")
        summaries.append(load.summarize(asyncio.run(load.offer(server, path, bodies))))
        if failed := summaries[-1].failed:
            raise UserError(f"{failed} of {len(items)} streams failed; the server's output above says why")
    return summaries


if __name__ == "__main__":
    cli.run(main)
