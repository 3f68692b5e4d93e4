"""Two servers behind SGLang's own router: prompts that share beginnings and conversations that grow, handed out in turn and by
what each server has cached; then one of the servers is killed under load.

python stage9_server/bench_replicas.py --save

Each server computes with one thread, so that two of them fit on two cores.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.config import UserError
from stage9_server import load, local_server
from stage9_server.client import words

POLICIES = ("round_robin", "cache_aware")
CONCURRENCY, KILL_RATE, KILL_AFTER = 8, 2.0, 5.0  # requests; per second; seconds
COLUMNS = ["workload", "policy", "requests", "per server", "cached, %", "TTFT p50, ms", "TTFT p90, ms", "seconds"]
KILL_COLUMNS = ["requests", "answered", "failed", "last failure after, s", "TTFT p50 before, ms", "TTFT p50 after, ms"]


def main() -> None:
    parser = cli.parser(__doc__)
    args = parser.parse_args()
    if not importlib.util.find_spec("sglang_router"):
        raise UserError("this needs the package sglang-router (Linux): pip install -r requirements.txt")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the servers
    with contextlib.ExitStack() as stack:
        flags = (*local_server.as_flags(args), "--port", "0", "--served-model-name", "model", "--max-running", "16")
        servers = [stack.enter_context(local_server.running(*flags)) for _ in range(2)]
        rows = []
        for policy in POLICIES:
            for name, send in WORKLOADS.items():
                flush(servers)
                with routing(policy, servers) as url:
                    before = served(servers)
                    summary = load.summarize(asyncio.run(send(load.Server(url))))
                    rows.append(row(name, policy, summary, served(servers) - before))
                    report.say(" ".join(map(str, rows[-1])))
        flush(servers)
        with routing("cache_aware", servers) as url:
            kill_row, errors = asyncio.run(kill_one(load.Server(url), servers[0]))
    report.table("Two servers behind the router", COLUMNS, rows)
    report.table("One of them is killed", KILL_COLUMNS, [kill_row])
    for error in errors:
        report.say(f"a client saw: {error}")
    if args.save:
        killed = {"columns": KILL_COLUMNS, "rows": [kill_row], "errors": errors}
        report.save(__file__, "replicas", args, {"columns": COLUMNS, "rows": rows, "killed": killed})


async def shared_prefix(server: load.Server) -> list[load.Reply]:
    return await load.offer(server, "/v1/completions", prompts(), concurrency=CONCURRENCY)


async def multi_turn(server: load.Server) -> list[load.Reply]:
    talks = [[{"content": words(item)} for item in turns] for turns in workload.multi_turn(12, 3, 128, 48, 8)]
    return await load.converse(server, BODY, talks, concurrency=CONCURRENCY)


WORKLOADS = {"shared_prefix": shared_prefix, "multi_turn": multi_turn}
BODY = {"model": "model", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def prompts() -> list[dict]:
    """As text, since the router compares text."""
    return [BODY | {"prompt": words(item)} for item in workload.shared_prefix(6, 8, 256, 16, 8)]


def row(name: str, policy: str, summary: load.Summary, per_server: np.ndarray) -> list:
    if summary.failed:
        raise UserError(f"{summary.failed} requests failed; the servers' output above says why")
    cached = round(100 * summary.cached_tokens / summary.prompt_tokens, 1)
    ttft = load.milliseconds(np.percentile(summary.latencies["TTFT"], (50, 90)))
    shares = " + ".join(f"{count:.0f}" for count in per_server)
    return [name, policy, summary.requests, shares, cached, *ttft, round(summary.seconds, 1)]


async def kill_one(server: load.Server, victim: local_server.Running) -> tuple[list, list[str]]:
    """(its row, what failed requests were told); one of two servers gets SIGKILL while requests come."""
    requests = asyncio.ensure_future(load.offer(server, "/v1/completions", prompts(), rate=KILL_RATE))
    await asyncio.sleep(KILL_AFTER)
    killed_at = time.perf_counter()
    victim.process.send_signal(signal.SIGKILL)
    replies = await requests
    failed = [reply for reply in replies if reply.error]
    last = max((reply.sent_at - killed_at for reply in failed), default=0.0)
    ttft = [
        round(1e3 * float(np.median([r.ttft for r in replies if r.arrivals and (r.sent_at < killed_at) == before])), 1)
        for before in (True, False)
    ]
    numbers = [len(replies), len(replies) - len(failed), len(failed), round(last, 1)]
    return [*numbers, *ttft], sorted({reply.error for reply in failed})


def served(servers: list[local_server.Running]) -> np.ndarray:
    """Sequences that each of them has answered."""
    return np.array([local_server.metrics(server.url)["sglang:num_requests_total"] for server in servers])


def flush(servers: list[local_server.Running]) -> None:
    for server in servers:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/flush_cache", method="POST"), timeout=30).close()


@contextlib.contextmanager
def routing(policy: str, servers: list[local_server.Running]) -> Iterator[str]:
    """The address of a router before these servers. UserError if it doesn't find them."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(str(free.getsockname()[1]))
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
    command += [
        "--prometheus-port",
        ports[1],
        "--policy",
        policy,
        "--log-level",
        "error",
        "--cb-failure-threshold",
        "1",
    ]
    command += ["--worker-urls", *(server.url for server in servers)]
    url = f"http://127.0.0.1:{ports[0]}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(f"{url}/workers", timeout=5).read().count(b'"url"') == len(servers):
                        break
                time.sleep(0.1)
            else:
                raise UserError("the router did not find the servers; its output is above")
            yield url
        finally:
            process.kill()


if __name__ == "__main__":
    cli.run(main)
