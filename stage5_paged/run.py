"""Stage 5: the same memory holds more requests in pages than in slots; and when it runs out, nobody's text suffers."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.checkpoint import load_tokenizer
from stage2_req.engine import Engine
from stage2_req.sampling import SamplingParams
from stage4_batch.build import build_engine as build_slots
from stage5_paged.build import build_engine

MEMORY, LONGEST = 4096, 512  # rows of the pool; tokens that a request may have
PAGE_SIZES = (1, 16, 64, 256)


def main() -> None:
    args = cli.parser(
        __doc__, "max_running", "max_batch_tokens", "page_size", "kv_tokens", "memory_fraction"
    ).parse_args()
    data = {"memory": memory(args), "retraction": retraction(args)}
    if args.save:
        report.save(__file__, "", args, data)
        draw(data["memory"])


def memory(args) -> dict:
    """Bookkeeping does not depend on the model, so a tiny one with random weights serves to watch it."""
    report.heading(f"128 requests, {MEMORY:,} rows of memory, at most {LONGEST} tokens a request")
    config = cli.config(
        args, model="dummy:tiny", dtype="float32", device="cpu", max_model_len=LONGEST, max_batch_tokens=512
    )
    engines = {"slots": build_slots(cli.config(args, **vars(config) | {"max_running": MEMORY // LONGEST}))}
    for size in PAGE_SIZES:
        engines[f"pages of {size}"] = build_engine(
            cli.config(args, **vars(config) | {"page_size": size, "kv_tokens": MEMORY, "max_running": 128})
        )
    rows, curves = [], {}
    for name, engine in engines.items():
        running, waste, steps = watch(engine)
        curves[name] = running
        retracted = getattr(engine.scheduler, "num_retracted", 0)
        rows.append([name, max(running), round(float(np.mean(running)), 1), round(100 * waste, 1), retracted, steps])
    report.table(
        "", ["memory in", "most at once", "mean at once", "rows held in vain, %", "retractions", "steps"], rows
    )
    return {"rows": rows, "running": curves}


def watch(engine: Engine) -> tuple[list[int], float, int]:
    """Run the scaled offline workload; requests running at each step, mean share of held rows without a token."""
    for item in workload.offline(scale=0.25, vocab_size=engine.model.vocab_size)[:128]:
        engine.add(item.prompt_ids, SamplingParams(max_tokens=item.max_tokens, ignore_eos=True))
    running, used, held = [], [], []
    while engine.has_work():
        engine.step()
        if reqs := engine.scheduler.running:
            running.append(len(reqs))
            used.append(sum(req.cached_len for req in reqs))
            held.append(engine.cache.usage() * MEMORY)
    return running, 1 - sum(used) / sum(held), len(running)


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
        rows.append([name, kv_tokens, stats.steps, stats.computed_tokens, engine.scheduler.num_retracted])
    report.table("", ["pool", "tokens", "steps", "positions computed", "retractions"], rows)
    same = texts["ample"] == texts["tight"]
    report.say(f"same {len(prompts)} texts, greedy and sampled: {'yes' if same else 'NO'}")
    return {"rows": rows, "same": same}


def draw(memory: dict) -> None:
    with report.plot(__file__, "running", f"Requests running in {MEMORY:,} rows of memory", "step", "requests") as axes:
        for name, running in memory["running"].items():
            axes.plot(running, label=name)


if __name__ == "__main__":
    cli.run(main)
