"""A server under all that can go wrong, for as long as you like: python -m tests.soak --seconds 600

Clients ask, leave, read slowly or not at all and send nonsense, more of them than the server takes; its processes are
killed, as often as it is ready to restart them. In the pauses between the rounds nothing may be left of it: every page
free, and as many files, sockets and bytes in each process as in the pauses before. In the end it must stop cleanly.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from stage9_server import local_server
from stage9_server.guard import restarts
from tests.conftest import make_text_checkpoint

CLIENTS, CLIENT_SECONDS, PATIENCE = 24, 4.0, 120.0
# Few tokens a step: oneDNN keeps a kernel for every number of rows that it has met, so the scheduler grows till it has met all.
FLAGS = {
    "device": "cpu", "dtype": "float32", "page-size": 16, "kv-tokens": 2048, "max-model-len": 256, "tokenizers": 2,
    "max-running": 12, "max-batch-tokens": 32, "max-queue": 24, "max-concurrent": 48, "client-seconds": CLIENT_SECONDS, "port": 0,
}  # fmt: skip
GROWTH = 24 << 20  # bytes that a process may have gained since its first pause, besides 5 %
NONSENSE = [
    b"", b"[", b"[]", b'{"model": 1}', b'{"model": "x", "prompt": "x"}', b"\xff" * 1000, b"[" * 100_000, b" " * (5 << 20),
]  # fmt: skip


@dataclass
class Report:
    outcomes: Counter = field(default_factory=Counter)  # (what the client did, what came of it)
    kills: Counter = field(default_factory=Counter)
    samples: dict[str, list[dict]] = field(default_factory=lambda: defaultdict(list))  # of each process, in the pauses
    faults: list[str] = field(default_factory=list)


class Clients:
    """One round of load."""

    def __init__(self, url: str, model: str, rng: random.Random, report: Report):
        self.url, self.model, self.rng, self.report = url, model, rng, report
        self.ways = (
            [self.whole] * 3 + [self.stream] * 4 + [self.leave] * 3 + [self.slow, self.deaf, self.nonsense, self.count]
        )

    async def run(self, seconds: float, killer: "Killer") -> None:
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as self.http:
            await asyncio.gather(killer.run(end), *(self.client(end) for _ in range(CLIENTS)))

    async def client(self, end: float) -> None:
        while time.monotonic() < end:
            way = self.rng.choice(self.ways)
            try:
                result = await way()
            except httpx.TransportError as error:
                result = f"broken: {type(error).__name__}"
            self.report.outcomes[way.__name__, result] += 1
            if result.startswith("broken"):
                self.report.faults.append(f"a client that did {way.__name__} got no answer: {result}")
            await asyncio.sleep(0.02 if result == "whole" else self.rng.random() / 5)

    def body(self, **fields) -> dict:
        rng = self.rng
        body = {"model": self.model, "max_tokens": rng.choice([1, 5, 20, 60]), "temperature": rng.choice([0, 1, 2])}
        body |= {"n": rng.choice([1, 1, 1, 4]), "ignore_eos": rng.random() < 0.7, "logprobs": rng.choice([None, 3])}
        body |= {"prompt": "shared " * rng.choice([0, 8, 8]) + str(rng.random()), "stop": rng.choice([None, "e"])}
        body |= {"presence_penalty": rng.choice([0, 0, 1])}
        return body | fields

    def error(self, answer: httpx.Response) -> str:
        """Every one has OpenAI's form and a message."""
        known = answer.status_code in (400, 404, 413, 429, 500, 503) and len(answer.json()["error"]["message"]) > 10
        return str(answer.status_code) if known else f"broken: {answer.status_code} {answer.text[:100]}"

    async def whole(self) -> str:
        body = self.body()
        answer = await self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return self.error(answer)
        reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
        return "whole" if len(reasons) == body["n"] and set(reasons) <= {"stop", "length"} else f"broken: {reasons}"

    async def stream(self, pause: float = 0.0, leave_after: int | None = None, **fields) -> str:
        received = b""
        ask = self.http.stream("POST", "/v1/completions", json=self.body(stream=True, **fields))
        async with ask as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self.error(answer)
            async for chunk in answer.aiter_bytes():
                received += chunk
                if leave_after is not None and received.count(b"data: ") > leave_after:
                    return "left"
                await asyncio.sleep(pause)
        *_, last, nothing = received.split(b"\n\n")
        if nothing or not (last == b"data: [DONE]" or last.startswith(b'data: {"error"')):
            return f"broken: ends with {received[-100:]!r}"
        return "whole" if last == b"data: [DONE]" else "told of an error"

    async def leave(self) -> str:
        if self.rng.random() < 0.3:  # before anything has come
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() / 20):
                    return await self.whole()
            return "left"
        return await self.stream(leave_after=self.rng.choice([0, 1, 5]))

    async def slow(self) -> str:
        return await self.stream(pause=0.05)

    async def deaf(self) -> str:
        """Asks for much and reads nothing: the server may end it, after a while."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(self.body(stream=True, max_tokens=200, n=4, logprobs=20)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(self.rng.random() * CLIENT_SECONDS / 2)
        writer.transport.abort()
        return "left"

    async def nonsense(self) -> str:
        path = self.rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"])
        kind = self.rng.choice(["application/json", "application/json", "text/plain"])
        answer = await self.http.post(path, content=self.rng.choice(NONSENSE), headers={"content-type": kind})
        return "refused" if answer.status_code in (400, 404, 413, 415) else f"broken: {answer.status_code}"

    async def count(self) -> str:
        answer = await self.http.post("/tokenize", json={"prompt": "x" * self.rng.randint(0, 20_000)})
        return "whole" if answer.status_code == 200 else self.error(answer)


class Killer:
    """Kills workers, no more often than the server puts up with."""

    def __init__(self, server: local_server.Running, seconds: float, rng: random.Random, report: Report):
        self.server, self.report = server, report
        self.every = {
            name: max(seconds / 3, 1.1 * restarts.RESTART_WINDOW / restarts.RESTARTS[name.split("-")[0]])
            for name in workers(server)
        }
        start = time.monotonic()
        self.due = {name: start + seconds * rng.uniform(0.1, 0.5) for name in self.every}

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            for name, at in self.due.items():
                if time.monotonic() > at:
                    os.kill(workers(self.server)[name], signal.SIGKILL)
                    self.report.kills[name] += 1
                    self.due[name] += self.every[name]
            await asyncio.sleep(0.1)


def workers(server: local_server.Running) -> dict[str, int]:
    """Process ids by name; of the latest of each."""
    ready = [line.split() for line in list(server.lines) if " is ready (process " in line]
    return {words[0]: int(words[-1].rstrip(")")) for words in ready}


def pause(server: local_server.Running, report: Report, temp: Path) -> None:
    """Wait until nothing is under way, and write down what there is."""
    end, found = time.monotonic() + PATIENCE, {}
    while time.monotonic() < end:
        healthy = httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        found = local_server.metrics(server.url)
        running = [found.get(f"sglang:{name}", 1) for name in ("num_running_reqs", "num_queue_reqs")]
        healthy &= all(psutil.pid_exists(pid) for pid in workers(server).values())  # each of them, and not just enough
        if healthy and not any([*running, found["sglang:sequences_in_flight"]]):
            break
        time.sleep(0.1)
    else:
        report.faults.append(f"something is still under way after {PATIENCE:g} s: {found}")
    time.sleep(1.2)  # the scheduler reports once a second; connections that were given up are closed
    found = local_server.metrics(server.url)
    if found.get("sglang:pages_free") != found.get("sglang:pages"):
        report.faults.append(f"pages are lost: {found}")
    for name, pid in {"api": server.process.pid, **workers(server)}.items():
        process = psutil.Process(pid)
        files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        sockets = sum(file.startswith("socket:") for file in files)
        sample = {"pid": pid, "MB": process.memory_info().rss / 2**20, "files": len(files), "sockets": sockets}
        sample |= {"threads": process.num_threads(), "children": len(process.children())}
        report.samples[name].append(sample | {"in the folder": sum(1 for _ in temp.rglob("*"))})


def check_growth(report: Report, seconds: float) -> None:
    """A process that was killed starts anew: only its successor's own pauses are compared.

    Memory is judged only in runs of a minute or more: until then, libraries fill their caches.
    """
    for name, samples in report.samples.items():
        mine = [sample for sample in samples if sample["pid"] == samples[-1]["pid"]]
        first, last = mine[min(1, len(mine) - 1)], mine[-1]  # the first pause is the end of the warm-up
        if seconds >= 60 and last["MB"] > 1.05 * first["MB"] + GROWTH / 2**20:
            report.faults.append(f"{name} has grown from {first['MB']:.0f} to {last['MB']:.0f} MB")
        for what in ("files", "sockets", "threads", "children", "in the folder"):
            # a connection to a restarted worker may be re-opened just now
            if last[what] > max(sample[what] for sample in mine[: len(mine) // 2 + 1]) + 2:
                report.faults.append(f"{name} has more {what}: {[sample[what] for sample in mine]}")


def soak(model: Path, seconds: float, seed: int = 0) -> Report:
    rng, report = random.Random(seed), Report()
    temp = Path(tempfile.mkdtemp(prefix="soak-"))
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(temp)
    tempfile.tempdir = None
    flags = [f"--{name}={value}" for name, value in {"model": model, **FLAGS}.items()]
    rounds = max(3, round(seconds / 20))

    async def load(server: local_server.Running) -> None:
        killer = Killer(server, seconds, rng, report)
        for _ in range(rounds):
            await Clients(server.url, str(model), rng, report).run(seconds / rounds, killer)
            await asyncio.to_thread(pause, server, report, temp)

    try:
        with local_server.running(*flags) as server:
            asyncio.run(load(server))
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(30)
            pids = workers(server).values()
        if status:
            report.faults.append(f"the server ended with status {status}")
        if left := [pid for pid in pids if psutil.pid_exists(pid)]:
            report.faults.append(f"processes are left: {left}")
        if left := list(temp.iterdir()):
            report.faults.append(f"files are left: {left}")
        else:
            temp.rmdir()
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    check_growth(report, seconds)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of load, pauses not counted (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(make_text_checkpoint(Path(folder) / "model").path, args.seconds, args.seed)
    for (way, result), count in sorted(report.outcomes.items()):
        print(f"{way:10} {result:20} {count:7,}")
    print("killed:", dict(report.kills))
    for name, samples in report.samples.items():
        for key in samples[0]:
            print(f"{name:12} {key:14}", *(f"{sample[key]:.0f}" for sample in samples))
    print(*(report.faults or ["nothing is left, and every call was answered"]), sep="\n")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
