"""The engine alone and through the server: the `offline` workload, as so many streams at the same time, and the time to
the first token of requests that come one by one.

python stage9_server/bench_online.py --model dummy:qwen3-0.6b --max-model-len 4096
"""

import asyncio
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.checkpoint import load_config
from common.config import EngineConfig, UserError
from common.device import synchronize
from stage2_req.engine import Engine
from stage7_radix.params import RequestParams
from stage8_tp.build import build_engine
from stage9_server import load, local_server
from stage9_server.client import completions

FIRST_COLUMNS = ["way", "p50, ms", "p90, ms"]
COLUMNS = ["way", "round", "requests", "output tokens", "seconds", "output tokens/s"]
TEMPERATURE = 0.6
SINGLE, SINGLES, PAUSE = workload.Item([7] * 64, 1), 100, 0.02  # a request, how many, and seconds before each


def main() -> None:
    parser = cli.parser(__doc__, *(flag for flag in local_server.ENGINE_FLAGS if flag not in (*cli.COMMON, "tp")))
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and number of requests (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="of each; the last one counts (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.scale <= 1 or args.rounds < 1:
        raise UserError("--scale takes a number above 0 and at most 1, --rounds one of at least 1")
    vocab_size = load_config(args.model)[0].vocab_size
    items = workload.offline(args.scale, vocab_size)[: max(1, round(256 * args.scale))]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose end frees the device's memory
        rows, alone = pool.submit(offline, cli.config(args), items, args.rounds).result()
    with local_server.running(*local_server.as_flags(args), "--port", "0", "--max-queue", str(len(items))) as server:
        summaries, served = online(server.url, args.model, items, args.rounds)
    rows += [row("online", i, len(items), s.output_tokens, s.seconds) for i, s in enumerate(summaries, 1)]
    percent = round(100 * rows[-1][-1] / rows[args.rounds - 1][-1], 1)
    report.table(f"{args.model}, {len(items)} requests at once", COLUMNS, rows)
    report.table("Online, the last round", load.COLUMNS, summaries[-1].rows)
    report.say(f"online / offline: {percent} %")
    ways = {"engine alone": alone, "through the server": served}
    firsts = [[way, *load.milliseconds(np.percentile(seconds, (50, 90)))] for way, seconds in ways.items()]
    added = round(firsts[1][1] - firsts[0][1], 2)
    report.table(f"First token, {SINGLES} requests one by one", FIRST_COLUMNS, firsts)
    report.say(f"the server adds {added} ms")
    if args.save:
        latency = {"columns": load.COLUMNS, "rows": summaries[-1].rows}
        first = {"columns": FIRST_COLUMNS, "rows": firsts, "added, ms": added}
        data = {"columns": COLUMNS, "rows": rows, "latency": latency, "online / offline, %": percent, "first": first}
        name = args.model.replace("dummy:", "online-") if args.model.startswith("dummy:") else "online"
        report.save(__file__, name, args, data)


def row(way: str, number: int, requests: int, tokens: int, seconds: float) -> list:
    return [way, number, requests, tokens, round(seconds, 2), round(tokens / seconds, 1)]


def offline(config: EngineConfig, items: list[workload.Item], rounds: int) -> tuple[list[list], list[float]]:
    """(the rounds' rows, seconds to each single request's token)"""
    engine, seconds = build_engine(config), []
    rows = [row("offline", i, *generate(engine, items, f"round {i}")) for i in range(1, rounds + 1)]
    for i in range(SINGLES):
        time.sleep(PAUSE)
        start = time.perf_counter()
        engine.add(SINGLE.prompt_ids, params(SINGLE, f"single {i}"))
        while engine.has_work():
            engine.step()
        seconds.append(time.perf_counter() - start)
    return rows, seconds


def params(item: workload.Item, salt: str) -> RequestParams:
    """The salt keeps a round from finding the last one's prefixes."""
    return RequestParams(temperature=TEMPERATURE, max_tokens=item.max_tokens, ignore_eos=True, cache_salt=salt)


def generate(engine: Engine, items: list[workload.Item], salt: str) -> tuple[int, int, float]:
    """(requests, output tokens, seconds)"""
    synchronize(engine.device)
    start = time.perf_counter()
    reqs = engine.generate([item.prompt_ids for item in items], [params(item, salt) for item in items])
    return len(reqs), sum(len(req.output_ids) for req in reqs), time.perf_counter() - start


def online(url: str, model: str, items: list[workload.Item], rounds: int) -> tuple[list[load.Summary], list[float]]:
    """(the rounds' summaries, seconds to each single request's token)"""
    server, summaries, seconds = load.Server(url), [], []
    for i in range(1, rounds + 1):
        path, bodies = completions(model, items, TEMPERATURE, cache_salt=f"round {i}")
        summaries.append(load.summarize(asyncio.run(load.offer(server, path, bodies))))
        if failed := summaries[-1].failed:
            raise UserError(f"{failed} of {len(items)} streams failed; the server's output above says why")
    with closing(HTTPConnection(server.host, server.port)) as connection:
        for i in range(SINGLES):
            time.sleep(PAUSE)
            path, (body,) = completions(model, [SINGLE], TEMPERATURE, cache_salt=f"single {i}", stream=True)
            start = time.perf_counter()
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.readline()
            seconds.append(time.perf_counter() - start)
            rest = answer.read()
            if answer.status != 200:
                raise UserError(f"a single request got status {answer.status}: {rest[:300].decode(errors='replace')}")
    return summaries, seconds


if __name__ == "__main__":
    cli.run(main)
