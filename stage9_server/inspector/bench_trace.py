"""What the inspector costs: a server's throughput and the engine's steps while they are watched, and the page's frames on
a long trace.

python stage9_server/inspector/bench_trace.py    # the frames need playwright and Chromium
"""

import argparse
import asyncio
import contextlib
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from common import cli, report, workload
from common.checkpoint import load_config
from common.config import UserError
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage5_paged.bench_host import StubModel
from stage7_radix.build import build_engine
from stage9_server import load, local_server
from stage9_server.client import completions
from stage9_server.inspector.live import EVERY, SHARE
from stage9_server.inspector.trace import Trace

PAGES, RUNNING = 100_000, 256
STREAMS, PROMPT, OUTPUT = 16, 32, 32  # requests at once at the server, and their tokens
# Of the page, in milliseconds. What its own code takes for a step, in a row or after a jump to anywhere;
# and the time from one frame on the screen to the next, with a step each.
DRAWN = """([from, count]) => {
    const times = [];
    for (let k = 0; k < count; k++) {
        inspector.go(from < 0 ? (k * 7919) % inspector.trace.lines.length : from + k);
        const start = performance.now(); inspector.draw(); times.push(performance.now() - start);
    }
    return times;
}"""
SHOWN = """async ([from, count]) => {
    const times = [], next = () => new Promise(requestAnimationFrame);
    for (let k = 0, last = await next(); k < count; k++) {
        inspector.go(from + k);
        const now = await next();
        times.push(now - last);
        last = now;
    }
    return times;
}"""


def main() -> None:
    parser = cli.parser(__doc__, *(flag for flag in local_server.ENGINE_FLAGS if flag not in (*cli.COMMON, "tp")))
    parser.add_argument("--rounds", type=int, default=7, help="of each way to serve (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long trace (default: %(default)s)")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1:
        raise UserError("--rounds and --steps take numbers of at least 1")
    torch.set_num_threads(1)
    data = {"server": {"columns": ["server", "output tokens/s", "of the first, %", "half of the rounds, %"]}}
    data["server"]["rows"] = served(args)
    report.table(f"{args.model}, {STREAMS} streams, {args.rounds} rounds of each", **data["server"])
    data["steps"] = {"columns": ["watched", "microseconds per step", "share of the time, %"], "rows": cost()}
    title = f"The host's steps, {RUNNING} requests, {PAGES:,} pages of one token, a model that costs nothing"
    report.table(title, **data["steps"])
    if shutil.which("chromium"):
        data["page"] = {"columns": ["milliseconds", "p50", "p95", "max"]} | frames(args.steps)
        report.table(f"The page on {args.steps:,} such steps", data["page"]["columns"], data["page"]["rows"])
    if args.save:
        report.save(str(Path(__file__).parent), "inspector", args, data)


@contextlib.contextmanager
def looking_on(server: load.Server) -> Iterator[None]:
    """Somebody follows the server's steps. What the page does with them would happen on another machine."""
    connection = HTTPConnection(server.host, server.port, timeout=60)
    connection.request("GET", "/inspector/events")
    answer = connection.getresponse()

    def read() -> None:
        with contextlib.suppress(OSError, HTTPException):
            while answer.read1(1 << 16):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        connection.sock.shutdown(socket.SHUT_RDWR)  # ends the reader's wait
        reader.join()
        connection.close()


def served(args: argparse.Namespace) -> list:
    """Throughput, side by side: each round has every way, in turns that begin with another one. The first round warms."""
    flags = [*local_server.as_flags(args), "--port", "0"]
    size = load_config(args.model)[0].vocab_size
    prompts = np.random.default_rng(0).integers(0, size, (STREAMS, PROMPT)).tolist()
    items = [workload.Item(prompt, OUTPUT) for prompt in prompts]
    found: dict[str, list[float]] = {"--inspect off": [], "steps, nobody looks": [], "steps, one looks": []}
    with local_server.running(*flags) as off, local_server.running(*flags, "--inspect", "steps") as on:
        for turn in range(args.rounds + 1):
            for name in [*found][turn % 3 :] + [*found][: turn % 3]:
                server = load.Server((off if name == "--inspect off" else on).url)
                path, bodies = completions(args.model, items, 0.0, cache_salt=f"{turn} {name}")
                with looking_on(server) if name.endswith("one looks") else contextlib.nullcontext():
                    summary = load.summarize(asyncio.run(load.offer(server, path, bodies)))
                if summary.failed:
                    raise UserError(f"{summary.failed} of {STREAMS} streams failed; the server's output above says why")
                found[name].append(summary.output_tokens / summary.seconds)
    rates = {name: np.array(of_rounds[1:]) for name, of_rounds in found.items()}
    base, rows = middle(rates["--inspect off"]), []
    for name, of_rounds in rates.items():
        low, high = (round(100 * float(rate) / base, 1) for rate in np.percentile(of_rounds, (25, 75)))
        rate = middle(of_rounds)
        rows.append([name, round(rate, 1), round(100 * rate / base, 1), f"{low} to {high}"])
    return rows


def middle(values: np.ndarray) -> float:
    """The mean of the middle half: what others do on this machine at the same time makes some rounds slow."""
    left_out = len(values) // 4
    return float(np.sort(values)[left_out : len(values) - left_out].mean())


def busy() -> Engine:
    """An engine of stage 7 with a stub for a model, and as many requests as can run."""
    config = cli.EngineConfig(
        model="dummy:tiny", device="cpu", dtype="float32", max_model_len=2048, max_running=RUNNING,
        max_batch_tokens=8192, page_size=1, kv_tokens=PAGES, overlap=False,
    )  # fmt: skip
    engine = build_engine(config)
    engine.runner.model = StubModel(8192)
    feed(engine)
    for _ in range(20):
        engine.step()
    return engine


def feed(engine: Engine) -> None:
    """So many requests of different lengths that some wait, always."""
    while len(engine.scheduler.waiting) < 32:
        uid = engine.next_uid
        length = 40 + uid * 37 % 200
        engine.add([uid % 500, *[1] * length], SamplingParams(max_tokens=100 + uid * 53 % 150, ignore_eos=True))


def cost(steps: int = 400) -> list:
    """Time of this process. Every turn that is watched lies between two that are not, to which it is compared."""
    engine = busy()

    def turn(limits: dict | None) -> float:
        """Seconds per step."""
        trace = None if limits is None else Trace(engine, **limits, max_lines=128)
        if trace:
            trace.record()  # a key frame, for somebody who has just come
        start = time.process_time()
        for _ in range(steps):
            engine.step()
            feed(engine)
        seconds = time.process_time() - start
        if trace:
            trace.close()
        return seconds / steps

    before, rows = [turn(None)], []
    for name, limits, turns in (("live", {"every": EVERY, "share": SHARE}, 24), ("every step", {}, 4)):
        watched, ratios = [], []
        for _ in range(turns):
            watched.append(turn(limits))
            before.append(turn(None))
            ratios.append(2 * watched[-1] / (before[-2] + before[-1]))
        rows.append([name, round(middle(np.array(watched)) * 1e6), round((middle(np.array(ratios)) - 1) * 100, 1)])
    return [["not at all", round(middle(np.array(before)) * 1e6), 0.0], *rows]


def frames(steps: int) -> dict:
    from playwright.sync_api import sync_playwright  # only here

    engine = busy()
    with Trace(engine, max_lines=steps, max_bytes=1 << 30) as trace, tempfile.TemporaryDirectory() as folder:
        for _ in range(steps):
            engine.step()
            feed(engine)
        path = Path(folder) / "long.jsonl"
        trace.save(path)
        found = {"lines": len(trace.ring), "megabytes": round(path.stat().st_size / 2**20), "rows": []}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            found["chromium"] = browser.version
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto((Path(__file__).parent / "page.html").as_uri() + "#lang=en")
            start = time.perf_counter()
            page.locator("#file").set_input_files(path)
            page.wait_for_function("inspector.trace", timeout=120_000)
            found["seconds to open"] = round(time.perf_counter() - start, 1)
            for name, code, begin, count in (
                ("drawing, steps in a row", DRAWN, steps // 2, 200),
                ("drawing, jumps to anywhere", DRAWN, -1, 60),
                ("from frame to frame, a step each", SHOWN, steps // 2, 200),
            ):
                times = np.array(page.evaluate(code, [begin, count]))
                p50, p95 = np.percentile(times, [50, 95])
                found["rows"].append([name, *(round(float(value), 1) for value in (p50, p95, times.max()))])
            browser.close()
    return found


if __name__ == "__main__":
    cli.run(main)
