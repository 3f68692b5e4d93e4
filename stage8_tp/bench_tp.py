"""One GPU against several: the `offline` workload, decode steps of 1, 64 and 256 requests, and what of them NCCL takes.

python stage8_tp/bench_tp.py                            # two GPUs, all three models: about five minutes
python stage8_tp/bench_tp.py --models qwen3-32b --save  # one model; rows of other models stay in the record
"""

import gc
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.profiler import profile

from common import cli, report, workload
from common.checkpoint import empty_model
from common.config import DUMMY_MODELS, EngineConfig, UserError
from common.device import resolve_dtype, synchronize
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage6_cudagraph.profiling import profile_steps
from stage6_cudagraph.run import start_decoding, stop
from stage8_tp.build import build_rank
from stage8_tp.engine import TPEngine
from stage8_tp.launch import run_ranks
from stage8_tp.ranks import Alone, Ranks
from stage8_tp.shard import Shard

BATCHES, STEPS, PROFILED = (1, 64, 256), 40, 10
OFFLINE = ("model", "GPUs", "weights, GiB per GPU", "KV tokens", "output tokens", "seconds", "output tokens/s", "steps")
DECODE = ("model", "GPUs", "batch", "ms per step", "tokens/s", "NCCL, ms per step", "NCCL, %", "NCCL calls per step")


def main() -> None:
    parser = cli.parser(
        __doc__, "max_batch_tokens", "max_running", "memory_fraction", flags=("device", "dtype", "save")
    )
    parser.set_defaults(max_batch_tokens=16384)
    parser.add_argument("--tp", type=int, help="GPUs (default: as many as torchrun has started, else 2)")
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "llama3-8b", "qwen3-32b"], choices=[*DUMMY_MODELS]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the offline workload's lengths (default: 1)")
    parser.add_argument("--no-offline", action="store_true", help="only the decode steps")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        raise UserError("--scale takes a number above 0 and at most 1")
    run_ranks(partial(bench, args), args.tp, args.device)


def bench(args, ranks: Ranks | Alone) -> None:
    """On every rank: first rank 0 by itself, then all together; model after model."""
    offline, decode = [], []
    for name in args.models:
        for group in (Alone(ranks.device), ranks)[: min(ranks.world, 2)]:
            ranks.barrier()  # none starts before all are here
            if group is ranks or ranks.rank == 0:
                one = measure(args, name, group)
                offline += one[0]
                decode += one[1]
                gc.collect()
                torch.cuda.empty_cache()
    if ranks.rank:
        return
    if args.save:
        offline, decode = merge(offline, decode, ranks.world)
        data = {"offline": {"columns": OFFLINE, "rows": offline}, "decode": {"columns": DECODE, "rows": decode}}
        report.save(__file__, "", args, data, devices=ranks.world)
        draw(decode, ranks.world)
    if offline:
        report.table("Offline workload", OFFLINE, offline)
    report.table("Decode steps, 512 tokens of context", DECODE, decode)


def measure(args, name: str, ranks: Ranks | Alone) -> tuple[list, list]:
    """Rows of `offline` and `decode`; none on the ranks that follow."""
    config = cli.config(args, model=f"dummy:{name}", max_model_len=2048, radix=False, tp=ranks.world)
    engine = build_rank(config, ranks)
    if ranks.rank:
        engine.follow()
        return [], []
    report.say(f"{name} on {ranks.world}: built")
    offline = [] if args.no_offline else [[name, ranks.world, *sizes(engine, config), *run_offline(engine, args.scale)]]
    batches = [batch for batch in BATCHES if batch <= (config.max_running or BATCHES[-1])]
    decode = [[name, ranks.world, batch, *time_decode(engine, batch)] for batch in batches]
    if ranks.world > 1:
        engine.close()
    return offline, decode


def sizes(engine: Engine | TPEngine, config: EngineConfig) -> tuple[float, int]:
    """GiB of rank 0's weights, and tokens in the KV pool."""
    shape, dtype = Shard(engine.model, 0, config.tp).config, resolve_dtype(config.dtype, engine.device)
    weights = sum(p.nbytes for p in empty_model(shape, torch.device("meta"), dtype).parameters())
    return round(weights / 2**30, 2), engine.stats().num_pages * engine.cache.page_size


def run_offline(engine: Engine | TPEngine, scale: float) -> tuple[int, float, int, int]:
    """After its prompts alone have been run, in whose steps kernels are compiled."""
    items = workload.offline(scale, engine.model.vocab_size)
    prompts = [item.prompt_ids for item in items]
    engine.generate(prompts, SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True))
    params = [SamplingParams(temperature=0.6, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    steps, start = engine.stats().steps, time.perf_counter()
    engine.generate(prompts, params)
    seconds, tokens = time.perf_counter() - start, sum(p.max_tokens for p in params)
    return tokens, round(seconds, 2), round(tokens / seconds), engine.stats().steps - steps


def time_decode(engine: Engine | TPEngine, batch: int) -> tuple[float, int, float, float, float]:
    start_decoding(engine, batch)
    synchronize(engine.device)
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    synchronize(engine.device)
    step = (time.perf_counter() - start) / STEPS * 1e3
    calls, talk = nccl(profile_steps(engine, PROFILED))
    stop(engine)
    return round(step, 3), round(batch / step * 1e3), round(talk, 3), round(100 * talk / step, 1), calls


def nccl(result: profile) -> tuple[float, float]:
    """(calls, milliseconds) per step of NCCL's kernels on rank 0, waiting for the other ranks included."""
    kernels = [e for e in result.key_averages() if e.key.startswith("ncclDevKernel")]
    return sum(e.count for e in kernels) / PROFILED, sum(e.self_device_time_total for e in kernels) / PROFILED / 1e3


def merge(offline: list, decode: list, world: int) -> list[list]:
    """With the rows of a record that is there, of models that were not measured now."""
    path = report.results_path(__file__, report.record_name(devices=world))
    if not path.is_file():
        return [offline, decode]
    old, now = json.loads(path.read_text()), {row[0] for row in decode}
    return [
        [row for row in old[part]["rows"] if row[0] not in now] + rows
        for part, rows in (("offline", offline), ("decode", decode))
    ]


def draw(rows: list, world: int) -> None:
    """How many times as fast a decode step is on all GPUs as on one."""
    times = {(model, count, batch): ms for model, count, batch, ms, *_ in rows}
    models = list(dict.fromkeys(row[0] for row in rows))
    batches = [batch for batch in BATCHES if all((model, world, batch) in times for model in models)]
    title, width = f"Decode steps on {world} GPUs", 0.8 / len(models)
    with report.plot(__file__, "decode", title, "requests in the step", "times as fast as on one") as axes:
        for i, model in enumerate(models):
            gains = [times[model, 1, batch] / times[model, world, batch] for batch in batches]
            bars = axes.bar([x + width * i for x in range(len(batches))], gains, 0.95 * width, label=model)
            axes.bar_label(bars, fmt="{:.2f}", fontsize=9)
        axes.axhline(1, color="gray", linewidth=1)
        axes.margins(y=0.3)  # room for the legend
        axes.set_xticks([x + width * (len(models) - 1) / 2 for x in range(len(batches))], batches)


if __name__ == "__main__":
    cli.run(main)
