"""Stage 8: one model on several ranks. The same tokens as on one, and what it takes: bytes per rank, bytes sent per token, time.

python stage8_tp/run.py --tp 2
torchrun --nproc-per-node 2 stage8_tp/run.py
"""

import gc
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import cli, report
from common.checkpoint import empty_model
from common.device import synchronize
from common.fetch import resolve_model
from common.tokenizer import load_tokenizer
from stage2_req.params import SamplingParams
from stage7_radix.build import build_engine as build_stage7
from stage8_tp.build import build_rank
from stage8_tp.launch import run_ranks
from stage8_tp.meter import MeteredRanks
from stage8_tp.ranks import Alone, Ranks
from stage8_tp.shard import Shard

QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "What is a prime number?")
WIDTH = 36  # characters of a weight in the figure


def main() -> None:
    parser = cli.parser(__doc__, "max_batch_tokens", "page_size", "kv_tokens", "memory_fraction")
    parser.add_argument("--tp", type=int, help="ranks (default: as many as torchrun has started, else 2)")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of the answers (default: %(default)s)")
    parser.set_defaults(dtype="float32")
    args = parser.parse_args()
    if not args.model.startswith("dummy:"):
        resolve_model(args.model)  # fetched once, before the ranks ask for it
    run_ranks(partial(milestone, args), args.tp, args.device)


def milestone(args, ranks: Ranks | Alone) -> None:
    """On every rank; all but the first follow it, and add their numbers at the end."""
    tokenizer = load_tokenizer(args.model)
    prompts = [tokenizer.chat([{"role": "user", "content": q}]) if tokenizer else [7 + len(q)] * 30 for q in QUESTIONS]
    params = [SamplingParams(temperature=0.6 * i, seed=i, max_tokens=args.max_tokens) for i in range(len(prompts))]
    if ranks.rank == 0:
        alone, ms_alone = on_one_rank(args, prompts, params)
    ranks.barrier()  # the others wait for that
    metered = MeteredRanks(ranks)
    engine = build_rank(cli.config(args, graph=False, overlap=False, tp=ranks.world), metered)
    metered.clear()
    pool = engine.runner.attention.pool
    if ranks.rank == 0:
        reqs, ms = timed(engine, prompts, params)
        if ranks.world > 1:
            engine.close()
    else:
        engine.follow()
    held = sum(half.nbytes for half in (*pool.k, *pool.v))
    numbers = ranks.all_gather_ints([held, round(metered.seconds * 1e6)])
    if ranks.rank:
        return
    for question, req in zip(QUESTIONS, reqs, strict=True):
        report.say(f"{question}\n  {tokenizer.decode(req.output_ids) if tokenizer else req.output_ids}")
    same = [req.output_ids for req in reqs] == alone
    report.say(f"\nsame tokens on {ranks.world} ranks as on 1: {'yes' if same else 'NO'}\n")
    shards = [Shard(engine.model, rank, ranks.world) for rank in range(ranks.world)]
    data = {
        "same": same,
        "memory": memory(shards, pool, [bytes_held for bytes_held, _ in numbers]),
        "collectives": collectives(engine, metered, shards[0], pool.k[0].element_size()) if ranks.world > 1 else {},
        "time": time_split(engine.stats().steps, ms_alone, ms, [us for _, us in numbers]),
    }
    figure(shards)
    if args.save:
        report.save(__file__, "", args, data)
        draw(shards)


def on_one_rank(args, prompts: list, params: list) -> tuple[list[list[int]], float]:
    """The tokens of stage 7's engine on all cores of this process, and milliseconds per step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    engine = build_stage7(cli.config(args, graph=False, overlap=False, tp=1))
    reqs, ms = timed(engine, prompts, params)
    torch.set_num_threads(threads)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [req.output_ids for req in reqs], ms


def timed(engine, prompts: list, params: list) -> tuple[list, float]:
    start = time.perf_counter()
    reqs = engine.generate(prompts, params)
    synchronize(engine.device)
    return reqs, (time.perf_counter() - start) / engine.stats().steps * 1e3


def memory(shards: list[Shard], pool, held: list[int]) -> dict:
    rows = []
    for name, config, size in (("1 rank", shards[0].whole, None), *((s.rank, s.config, held[s.rank]) for s in shards)):
        parameters = sum(p.numel() for p in empty_model(config, torch.device("meta"), pool.k[0].dtype).parameters())
        per_token = config.kv_bytes_per_token(pool.k[0].element_size())
        heads, kv = config.num_heads, config.num_kv_heads
        row = [name, heads, kv, config.intermediate_size, config.vocab_size, round(parameters / 1e6, 1)]
        rows.append([*row, per_token, round((size or per_token * pool.num_tokens) / 2**20, 1)])
    columns = [
        *("rank", "query heads", "KV heads", "MLP columns", "vocabulary", "parameters, M"),
        *("KV bytes per token", "KV pool, MiB"),
    ]
    report.table("What a rank holds", columns, rows)
    return {"columns": columns, "rows": rows}


def collectives(engine, metered: MeteredRanks, shard: Shard, size: int) -> dict:
    """Counted, against what follows from the model's configuration. Bytes are those that a rank brings to a collective."""
    stats, model = engine.stats(), shard.whole
    sums = 2 * model.num_layers + 1
    expected = {
        "all_reduce": (stats.steps * sums, stats.computed_tokens, sums * model.hidden_size * size),
        "all_gather": (stats.steps, stats.output_tokens, len(shard.vocab) * size),
        "broadcast": (stats.steps, stats.output_tokens, 8),
    }
    rows = [
        [name, metered.calls[name], calls, round(metered.bytes[name] / tokens), each]
        for name, (calls, tokens, each) in expected.items()
    ]
    columns = ["collective", "calls", "by the formula", "bytes per token", "by its formula"]
    report.table(f"What a rank sends in {stats.steps} steps", columns, rows)
    return {"columns": columns, "rows": rows}


def time_split(steps: int, ms_alone: float, ms: float, microseconds: list[int]) -> dict:
    rows = [["1 rank", round(ms_alone, 1), 0.0, round(ms_alone, 1)]]
    for rank, us in enumerate(microseconds):
        talk = us / steps / 1e3
        rows.append([f"rank {rank}", round(ms - talk, 1), round(talk, 1), round(ms, 1)])
    columns = ["", "compute", "communicate and wait", "step"]
    report.table("Milliseconds per step", columns, rows)
    return {"columns": columns, "rows": rows}


PLACES = (
    ("embed_tokens, lm_head", "rows (tokens)", "embed_tokens"),
    ("q_proj", "rows (heads)", "q_proj"),
    ("k_proj, v_proj", "rows (heads)", "k_proj"),
    ("o_proj", "columns (heads)", "o_proj"),
    ("gate_proj, up_proj", "rows", "gate_proj"),
    ("down_proj", "columns", "down_proj"),
)


def figure(shards: list[Shard]) -> None:
    rows = []
    for name, cut, projection in PLACES:
        spans = [shard.span(projection) for shard in shards]
        cells = [(cell + 0.5) / WIDTH * spans[0][1] for cell in range(WIDTH)]
        owners = [[rank for rank, (_, _, part) in enumerate(spans) if part.start <= at < part.stop] for at in cells]
        bar = "".join(f"{ranks[i % len(ranks)]:x}" for i, ranks in enumerate(owners))
        rows.append([name, cut, bar])
    rows.append(["norms", "not cut", "every rank has them"])
    report.table("Which rank has which part", ["weight", "cut into", "from its first to its last"], rows)


def draw(shards: list[Shard]) -> None:
    with report.plot(__file__, "weights", "Which rank has which part of a weight", "share of the weight", "") as axes:
        for y, (name, cut, projection) in enumerate(PLACES[::-1]):
            for shard in shards:
                _, size, part = shard.span(projection)
                color, share = report.COLOURS[shard.rank % len(report.COLOURS)], min(len(part), size) / size
                axes.barh(y, share, left=part.start / size, color=color, edgecolor="white")
                axes.text(
                    (part.start / size) + share / 2, y, f"rank {shard.rank}", ha="center", va="center", color="white"
                )
            axes.text(-0.02, y, f"{name}\n{cut}", ha="right", va="center")
        axes.set_yticks([])
        axes.grid(False)


if __name__ == "__main__":
    cli.run(main)
