"""Stage 5: the same memory holds more requests in pages than in fixed regions; and when it runs out, no text changes."""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.config import EngineConfig
from common.tokenizer import load_tokenizer
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage4_batch.build import build_engine as build_regions
from stage5_paged.build import build_engine

MEMORY, LONGEST, REQUESTS = 4096, 512, 72  # slots of the pool; tokens that a request may have; how many there are
PAGE_SIZES, RESERVES = (1, 16, 64, 256), (1, 16, 32)


def main() -> None:
    args = cli.parser(__doc__, flags=("model", "device", "dtype", "attn", "seed", "save")).parse_args()
    data = {"memory": memory(args), "retraction": retraction(args)}
    if args.save:
        report.save(__file__, "", args, data)
        draw(data["memory"])


def memory(args) -> dict:
    """Bookkeeping does not depend on the model, so a tiny one with random weights serves to watch it."""
    report.heading(f"{REQUESTS} requests, {MEMORY:,} slots of memory, at most {LONGEST} tokens per request")
    tiny = {
        "model": "dummy:tiny",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": LONGEST,
        "max_batch_tokens": 512,
    }
    rows, curves, head_room = [], {}, []
    engines = {"fixed regions": lambda: build_regions(EngineConfig(**tiny, max_running=MEMORY // LONGEST))}
    for size in PAGE_SIZES:
        paged = EngineConfig(**tiny, page_size=size, kv_tokens=MEMORY, max_running=REQUESTS)
        engines[f"pages of {size}"] = partial(build_engine, paged)
    for name, build in engines.items():
        seen = watch(build())
        curves[name] = seen.running
        mean = round(float(np.mean(seen.running)), 1)
        rows.append([name, max(seen.running), mean, round(100 * seen.waste, 1), seen.retracted, len(seen.running)])
    report.table(
        "", ["memory in", "most at once", "mean at once", "slots held in vain, %", "retractions", "steps"], rows
    )
    for reserve in RESERVES:
        engine = engines["pages of 1"]()
        engine.cache.reserve = reserve
        seen = watch(engine)
        head_room.append([reserve, seen.retracted, round(100 * seen.excess, 1), len(seen.running)])
    columns = ["tokens per running request", "retractions", "positions computed twice, %", "steps"]
    report.table("Head-room that admission leaves, pages of 1", columns, head_room)
    return {"rows": rows, "head_room": head_room, "running": curves}


class Seen(NamedTuple):
    running: list[int]  # requests, at each step
    waste: float  # share of held slots without a token
    retracted: int
    excess: float  # positions computed beyond what would have done


def watch(engine: Engine) -> Seen:
    """Run the scaled offline workload."""
    items = workload.offline(scale=0.25, vocab_size=engine.model.vocab_size)[:REQUESTS]
    for item in items:
        engine.add(item.prompt_ids, SamplingParams(max_tokens=item.max_tokens, ignore_eos=True))
    running, used, held = [], [], []
    while engine.has_work():
        engine.step()
        if reqs := engine.scheduler.running:
            running.append(len(reqs))
            used.append(sum(req.cached_len for req in reqs))
            held.append(engine.stats().usage * MEMORY)
    needed = sum(len(item.prompt_ids) + item.max_tokens - 1 for item in items)
    stats = engine.stats()
    return Seen(running, 1 - sum(used) / sum(held), stats.retracted, stats.computed_tokens / needed - 1)


def retraction(args) -> dict:
    report.heading("Memory for two, requests for six")
    tokenizer = load_tokenizer(args.model)
    questions = ("a cloud", "a river", "the moon", "a magnet", "an echo", "rust")
    prompts = [
        tokenizer.chat([{"role": "user", "content": f"What is {q}?"}]) if tokenizer else [i + 1] * 36
        for i, q in enumerate(questions)
    ]
    params = [
        SamplingParams(max_tokens=28, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    texts, rows, config = {}, [], {"max_model_len": 128, "page_size": 4, "max_running": 8}
    for name, kv_tokens in (("ample", 1024), ("tight", 160)):
        engine = build_engine(cli.config(args, **config, kv_tokens=kv_tokens))
        texts[name] = [req.output_ids for req in engine.generate(prompts, params)]
        stats = engine.stats()
        rows.append([name, kv_tokens, stats.steps, stats.computed_tokens, stats.retracted])
    report.table("", ["pool", "tokens", "steps", "positions computed", "retractions"], rows)
    same = texts["ample"] == texts["tight"]
    report.say(f"same {len(prompts)} texts, greedy and sampled: {'yes' if same else 'NO'}")
    return {"rows": rows, "same": same}


def draw(memory: dict) -> None:
    with report.plot(
        __file__, "running", f"Requests running in {MEMORY:,} slots of memory", "step", "requests"
    ) as axes:
        for name, running in memory["running"].items():
            axes.plot(running, label=name)


if __name__ == "__main__":
    cli.run(main)
