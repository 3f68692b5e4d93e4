"""Stage 6: what launching costs, and what is left of it with CUDA graphs and with the host one step ahead.

Without a GPU: the same padding and the same static buffers, proven by the same text; and the record of a machine that
has one.
"""

import gc
import json
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report
from common.device import resolve_device
from common.tokenizer import load_tokenizer
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine as build_stage5
from stage6_cudagraph.build import build_engine
from stage6_cudagraph.graph_runner import GraphRunner
from stage6_cudagraph.profiling import LABELS, device_ms, name_ranges, profile_steps, show_kernels

BATCHES, CONTEXT, STEPS = (1, 8, 64, 256), 512, 40
WAYS = {
    "eager": {"graph": False, "overlap": False},
    "graph": {"graph": True, "overlap": False},
    "graph + overlap": {"graph": True, "overlap": True},
}
COLUMNS = [
    "batch",
    "way",
    "ms per step",
    "host ms to launch",
    "device busy, ms",
    "device idle (estimate), %",
    "tokens/s",
]


def main() -> None:
    parser = cli.parser(
        __doc__, "max_batch_tokens", "page_size", "kv_tokens", "memory_fraction", "graph_max_batch", "graph_max_tokens"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="also write a trace of some steps, and a table")
    args = parser.parse_args()
    if resolve_device(args.device).type == "cpu":
        proof(args)
        show_record()
    else:
        if args.model == cli.EngineConfig.model:
            args.model = "dummy:qwen3-0.6b"
        rows = measure(args)
        if args.save:
            report.save(__file__, "", args, {"columns": COLUMNS, "rows": rows})
            draw(rows)
    if args.profile:
        write_profile(args)


def proof(args) -> None:
    report.heading("Padding and static buffers, without a GPU: same requests, same text")
    tokenizer = load_tokenizer(args.model)
    questions = ("a cloud", "a river", "the moon")
    prompts = [
        tokenizer.chat([{"role": "user", "content": f"What is {q}?"}]) if tokenizer else [9] * 30 for q in questions
    ]
    params = [SamplingParams(max_tokens=12 + 4 * i, temperature=0.7 * i, seed=i) for i in range(len(prompts))]
    texts, rows = {}, []
    for name, build, changes in (
        ("stage 5", build_stage5, {}),
        ("graph runner", build_engine, WAYS["graph"]),
        ("graph runner + overlap", build_engine, WAYS["graph + overlap"]),
    ):
        engine = build(cli.config(args, **changes))
        texts[name] = [req.output_ids for req in engine.generate(prompts, params)]
        replays = engine.runner.num_replays if isinstance(engine.runner, GraphRunner) else 0
        rows.append([name, engine.stats().steps, replays, "yes" if texts[name] == texts["stage 5"] else "NO"])
    report.table("", ["engine", "steps", "from static buffers", "same text as stage 5"], rows)
    report.say("Skipped: capturing and timing CUDA graphs, which needs a GPU.\n")


def show_record() -> None:
    path = report.results_path(__file__, "h200.json")
    if not path.is_file():
        return
    record = json.loads(path.read_text())
    machine = record["machine"]
    title = f"Not measured here: the record of an {machine['device']} ({record['flags']['model']}, {machine['date']})"
    report.table(title, record["columns"], record["rows"])


def measure(args) -> list:
    rows = []
    for way, changes in WAYS.items():
        engine = build_engine(cli.config(args, max_model_len=CONTEXT + 512, **changes))
        rows += [[batch, way, *time_decode(engine, batch)] for batch in BATCHES]
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    rows.sort(key=lambda row: row[0])
    report.table(f"{args.model}, {CONTEXT} tokens of context", COLUMNS, rows)
    return rows


def time_decode(engine: Engine, batch: int) -> list[float]:
    start_decoding(engine, batch)
    launches, forward = [], engine.runner.forward

    def timed(step):
        begin = time.perf_counter()
        samples = forward(step)
        launches.append(time.perf_counter() - begin)
        return samples

    engine.runner.forward = timed
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    step = (time.perf_counter() - begin) / STEPS * 1e3
    engine.runner.forward = forward
    # Of steps of their own, since a profile slows the host down. The kernels take some per cent longer there, too, so
    # what is left of the step is an estimate: 0 means a few per cent at most.
    busy = sum(device_ms(profile_steps(engine, STEPS), STEPS).values())
    stop(engine)
    launch = float(np.median(launches)) * 1e3
    return [
        round(step, 3),
        round(launch, 3),
        round(busy, 3),
        round(100 * max(0, 1 - busy / step), 1),
        round(batch / step * 1e3),
    ]


def start_decoding(engine: Engine, batch: int) -> None:
    """Bring requests to where all of them decode."""
    for i in range(batch):
        prompt = np.random.default_rng(i).integers(0, min(10000, engine.model.vocab_size), CONTEXT).tolist()
        engine.add(prompt, SamplingParams(temperature=0.6, max_tokens=500, ignore_eos=True))
    while engine.stats().waiting or any(req.extend_len > 1 for req in engine.scheduler.running):
        engine.step()
    for _ in range(5):
        engine.step()


def stop(engine: Engine) -> None:
    for req in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.abort(req.uid)
    while engine.has_work():
        engine.step()


def write_profile(args) -> None:
    report.heading("Profile of 10 decode steps")
    engine = build_engine(cli.config(args, max_model_len=CONTEXT + 512))
    name_ranges(engine)
    start_decoding(engine, 64 if engine.device.type == "cuda" else 4)
    result = profile_steps(engine, 10, args.profile)
    events = {event.key: event for event in result.key_averages()}
    rows = [[label, round(events[label].cpu_time_total / 10 / 1e3, 3)] for label in LABELS]
    report.table("On the host", ["range", "ms per step"], rows)
    if engine.device.type == "cuda":
        show_kernels(result, 10)
    stop(engine)


def draw(rows: list) -> None:
    with report.plot(__file__, "steps", "One decode step", "requests in the batch", "milliseconds") as axes:
        for way in WAYS:
            points = [row for row in rows if row[1] == way]
            axes.plot([str(row[0]) for row in points], [row[2] for row in points], marker="o", label=way)
        axes.set_yscale("log")


if __name__ == "__main__":
    cli.run(main)
