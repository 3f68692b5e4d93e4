"""What the inspector costs: the engine's steps while it is watched, and the page's frames on a long trace.

python stage9_server/inspector/bench_trace.py    # the frames need playwright and Chromium
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from common import cli, report
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage5_paged.bench_host import StubModel
from stage7_radix.build import build_engine
from stage9_server.inspector.live import EVERY, SHARE
from stage9_server.inspector.trace import Trace

PAGES, RUNNING = 100_000, 256
# of the page: milliseconds of steps in a row and of jumps to anywhere
MEASURE = """([from, count]) => {
    const times = [];
    for (let k = 0; k < count; k++) {
        inspector.go(from < 0 ? (k * 7919) % inspector.trace.lines.length : from + k);
        const start = performance.now(); inspector.draw(); times.push(performance.now() - start);
    }
    return times;
}"""


def main() -> None:
    parser = cli.parser(__doc__, flags=("save",))
    parser.add_argument("--steps", type=int, default=10_000, help="of the long trace (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = {"cost": cost()}
    columns = ["watched", "microseconds per step", "share of the time, %"]
    report.table(
        f"The host's steps, {RUNNING} requests, {PAGES:,} pages of one token, a model that costs nothing",
        columns,
        data["cost"],
    )
    if shutil.which("chromium"):
        data["page"] = frames(args.steps)
        columns = ["frames", "p50 ms", "p95 ms", "max ms"]
        report.table(f"The page on {args.steps:,} such steps", columns, data["page"])
    if args.save:
        report.save(__file__, "inspector", args, data)


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


def cost(rounds: int = 10, steps: int = 400) -> list:
    """Time of this process, side by side, in turns that begin with another one each; the median of the rounds."""
    engine, limits = busy(), {"not at all": None, "live": {"every": EVERY, "share": SHARE}, "every step": {}}
    times: dict[str, list[float]] = {name: [] for name in limits}
    for turn in range(rounds):
        for name in [*limits][turn % 3 :] + [*limits][: turn % 3]:
            trace = None if limits[name] is None else Trace(engine, **limits[name], max_lines=128)
            if trace:
                trace.record()  # a key frame, for somebody who has just come
            start = time.process_time()
            for _ in range(steps):
                engine.step()
                feed(engine)
            times[name].append((time.process_time() - start) / steps)
            if trace:
                trace.close()
    base = np.array(times["not at all"])
    return [
        [name, round(float(np.median(found)) * 1e6), round(float(np.median(np.array(found) / base - 1)) * 100, 1)]
        for name, found in times.items()
    ]


def frames(steps: int) -> list:
    from playwright.sync_api import sync_playwright  # only here

    engine = busy()
    with Trace(engine, max_lines=steps, max_bytes=1 << 30) as trace, tempfile.TemporaryDirectory() as folder:
        for _ in range(steps):
            engine.step()
            feed(engine)
        path = Path(folder) / "long.jsonl"
        trace.save(path)
        report.say(f"{len(trace.ring):,} lines, {path.stat().st_size / 2**20:.0f} MB")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto((Path(__file__).parent / "page.html").as_uri() + "#lang=en")
            start = time.perf_counter()
            page.locator("#file").set_input_files(path)
            page.wait_for_function("inspector.trace", timeout=120_000)
            report.say(f"opened in {time.perf_counter() - start:.1f} s")
            rows = []
            for name, begin, count in (("steps in a row", steps // 2, 200), ("jumps", -1, 60)):
                times = np.array(page.evaluate(MEASURE, [begin, count]))
                p50, p95 = np.percentile(times, [50, 95])
                rows.append([name, *(round(float(value), 1) for value in (p50, p95, times.max()))])
            browser.close()
    return rows


if __name__ == "__main__":
    cli.run(main)
