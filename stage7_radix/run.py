"""Stage 7: requests that begin alike pay for it once. Hit rates, time to first token, and what a small pool does to them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.config import EngineConfig
from common.tokenizer import load_tokenizer
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage2_req.parts import CacheManager
from stage2_req.req import Req
from stage7_radix.build import build_engine
from stage7_radix.show import drawing

PAGE_SIZES, POOLS = (1, 16, 64, 256), (0.25, 0.5, 0.75, 1.0, 1.25)
SYSTEM = "You are a patient teacher. Answer in one short sentence and use plain words."
QUESTIONS = ("What is a cloud?", "What is a cloud made of?", "Why is the sky blue?", "Why is the sea salty?")


def main() -> None:
    args = cli.parser(__doc__, "page_size", "kv_tokens").parse_args()
    engines = {way: build_engine(cli.config(args, radix=way == "on")) for way in ("off", "on")}
    picture(args, engines["on"])
    data = {
        "later": later(engines),
        "workloads": workloads(engines),
        "overhead": overhead(engines),
        "page_sizes": page_sizes(),
        "pools": pools(),
    }
    if args.save:
        report.save(__file__, "", args, data)
        draw(data)


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)


def ttft_ms(reqs: list[Req]) -> np.ndarray:
    """Milliseconds from arrival to the first token."""
    return np.array([req.first_token_at - req.arrived_at for req in reqs]) * 1e3


def hit_rate(reqs: list[Req]) -> float:
    """Per cent of the prompts' positions that came from the tree."""
    return round(100 * sum(req.cached_tokens or 0 for req in reqs) / sum(req.prompt_len for req in reqs), 1)


# --- with the model ---------------------------------------------------------------------------------------------


def picture(args, engine: Engine) -> None:
    report.heading("The tree: two chats are done, two are being answered")
    tokenizer = load_tokenizer(args.model)
    if tokenizer:
        system = {"role": "system", "content": SYSTEM}
        prompts = [tokenizer.chat([system, {"role": "user", "content": text}]) for text in QUESTIONS]
    else:
        prompts = [[1] * 40 + [2 + i // 2] * 20 + [9 + i] * 8 for i in range(len(QUESTIONS))]
    engine.generate(prompts[::2], greedy(24))
    for prompt in prompts[1::2]:
        engine.add(prompt, greedy(24))
    for _ in range(4):
        engine.step()
    decode = (lambda ids: tokenizer.decode(ids, skip_special=False)) if tokenizer else str
    report.console.print(drawing(engine.cache.tree, decode))
    while engine.has_work():
        engine.step()


def later(engines: dict[str, Engine], prompts: int = 8) -> list:
    report.heading(f"{prompts} prompts on one prefix of 512 tokens, one after another")
    rows = []
    for way, engine in engines.items():
        items = workload.shared_prefix(1, prompts, 512, 16, 1, engine.model.vocab_size)
        first, *others = ttft_ms([engine.generate([item.prompt_ids], greedy(1))[0] for item in items])
        rows.append([way, *(round(float(ms), 1) for ms in (first, np.median(others), max(others)))])
    rows.append(["off / on", *(round(off / on, 1) for off, on in zip(rows[0][1:], rows[1][1:], strict=True))])
    report.table("Milliseconds to the first token", ["cache", "first prompt", "later ones, median", "slowest"], rows)
    return rows


def workloads(engines: dict[str, Engine]) -> dict:
    report.heading("The same work in the same memory, with and without the cache")
    columns = ["workload", "cache", "hit rate, %", "prompt positions", "computed", "TTFT p50, ms", "p99", "tokens/s"]
    rows, texts = [], []
    for name, work in (("shared-prefix", ask), ("multi-turn", converse)):
        for way, engine in engines.items():
            before, start = engine.stats().computed_tokens, time.perf_counter()
            reqs = work(engine)
            seconds = time.perf_counter() - start
            texts.append([req.output_ids for req in reqs])
            prompt, out = sum(req.prompt_len for req in reqs), sum(len(req.output_ids) for req in reqs)
            computed = engine.stats().computed_tokens - before - (out - len(reqs))  # less the decodes
            p50, p99 = np.percentile(ttft_ms(reqs), (50, 99)).round().astype(int).tolist()
            rows.append([name, way, hit_rate(reqs), prompt, computed, p50, p99, round(out / seconds, 1)])
    report.table("", columns, rows)
    same = texts[::2] == texts[1::2]
    report.say(f"same texts with and without the cache: {'yes' if same else 'NO'}")
    return {"columns": columns, "rows": rows, "same": same}


def ask(engine: Engine) -> list[Req]:
    """10 questions on two system prompts of 256 tokens, all at once."""
    items = workload.shared_prefix(2, 5, 256, 16, 8, engine.model.vocab_size, seed=1)
    return engine.generate([item.prompt_ids for item in items], greedy(8))


def converse(engine: Engine, *shape: int) -> list[Req]:
    """Conversations side by side: all take a turn, then all take the next."""
    count, turns, first, following, answer = shape or (4, 3, 100, 25, 15)
    todo = workload.multi_turn(count, turns, first, following, answer, engine.model.vocab_size, seed=2)
    said, reqs = [[]] * count, []
    for items in zip(*todo, strict=True):
        prompts = [before + item.prompt_ids for before, item in zip(said, items, strict=True)]
        done = engine.generate(prompts, greedy(answer))
        said, reqs = [req.token_ids for req in done], reqs + done
    return reqs


class Clock:
    """Seconds that a cache manager has spent."""

    def __init__(self, cache: CacheManager):
        self.seconds = 0.0
        for method in ("admit", "allocate", "commit", "release"):
            setattr(cache, method, self.timed(getattr(cache, method)))

    def timed(self, method: Callable) -> Callable:
        def inner(*args):
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return inner


def overhead(engines: dict[str, Engine], rounds: int = 2) -> dict:
    report.heading("What the cache costs where nothing is shared: 16 prompts of 24 tokens, 12 new ones each")
    times, clocks = {way: [] for way in engines}, {way: Clock(engine.cache) for way, engine in engines.items()}
    for i in range(rounds):
        for way, engine in engines.items():
            prompts = np.random.default_rng(i).integers(0, min(engine.model.vocab_size, 10000), (16, 24)).tolist()
            start = time.perf_counter()
            engine.generate(prompts, greedy(12))
            times[way].append(time.perf_counter() - start)
    rows = [[way, round(min(times[way]), 2), round(clocks[way].seconds / rounds * 1e3, 1)] for way in engines]
    report.table("", ["cache", f"seconds, best of {rounds}", "of these in the cache manager, ms"], rows)
    share = 100 * (clocks["on"].seconds - clocks["off"].seconds) / sum(times["off"])
    report.say(f"the tree's bookkeeping takes {share:.2f} % of the time")
    return {"rows": rows, "share": round(share, 2)}


# --- without it: which page is found where does not depend on the model's answers ---------------------------------


def tiny_engine(**changes) -> Engine:
    fixed = {"model": "dummy:tiny", "device": "cpu", "dtype": "float32", "max_model_len": 1024}
    return build_engine(EngineConfig(**fixed | changes))


def page_sizes() -> list:
    rows = []
    for size in PAGE_SIZES:
        engine = tiny_engine(page_size=size, kv_tokens=16384)
        items = workload.shared_prefix(4, 8, 200, 30, 8, engine.model.vocab_size)
        shared = engine.generate([item.prompt_ids for item in items], greedy(8))
        rows.append([size, hit_rate(shared), hit_rate(converse(engine, 8, 4, 70, 45, 18))])
    columns = ["page size", "shared-prefix (prefix of 200)", "multi-turn (63 more a turn)"]
    report.table("Hit rate in per cent against page size", columns, rows)
    return rows


def pools() -> list:
    shape, rows = (12, 4, 70, 45, 18), []
    count, turns, first, following, answer = shape
    working_set = count * (first + (turns - 1) * following + turns * answer)
    for share in POOLS:
        engine = tiny_engine(page_size=16, kv_tokens=int(share * working_set), max_running=4)
        reqs = converse(engine, *shape)
        stats = engine.stats()
        rows.append([share, hit_rate(reqs), stats.computed_tokens, stats.retracted])
    columns = ["pool / all conversations", "hit rate, %", "positions computed", "retractions"]
    report.table(f"{count} conversations take turns in one pool; {working_set:,} tokens in the end", columns, rows)
    return rows


def draw(data: dict) -> None:
    with report.plot(__file__, "pages", "Hit rate and page size", "tokens in a page", "per cent") as axes:
        for column, name in ((1, "shared-prefix, prefixes of 200"), (2, "multi-turn, 63 more a turn")):
            axes.plot(
                [str(row[0]) for row in data["page_sizes"]],
                [row[column] for row in data["page_sizes"]],
                label=name,
                marker="o",
            )
        axes.set_ylim(0, 100)
    with report.plot(
        __file__, "ttft", "8 prompts on one prefix of 512 tokens", "", "milliseconds to the first token"
    ) as axes:
        for i, (row, colour) in enumerate(zip(data["later"][:2], report.COLOURS[3::-3], strict=True)):
            bars = axes.bar(
                [x + 0.4 * i for x in range(2)], row[1:3], width=0.38, color=colour, label=f"cache {row[0]}"
            )
            axes.bar_label(bars)
        axes.set_xticks([0.2, 1.2], ["first prompt", "later ones, median"])


if __name__ == "__main__":
    cli.run(main)
