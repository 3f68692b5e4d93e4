"""The `offline` workload: 256 prompts at once, 142,827 tokens in, 133,966 out; output tokens per second.

python stage6_cudagraph/bench_offline.py --model dummy:qwen3-0.6b --max-model-len 4096
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import cli, report, workload
from common.config import UserError
from common.device import resolve_dtype, synchronize
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage6_cudagraph.bench_limits import READ, parameters
from stage6_cudagraph.build import build_engine
from stage6_cudagraph.profiling import device_ms, profile_steps

STEPS = 4  # that are profiled
PARTS = {  # of a step, by how its kernels' names begin; what no other part claims is the last one's
    "attention": ("_attend", "_merge"),
    "matrix products of the layers": ("_linear",),
    "head": ("nvjet", "sm90", "cutlass", "gemm", "void cutlass"),
    "norms, rope, SiLU": ("_rms_norm", "_qk_norm", "_silu"),
    "draw": ("_best_of",),
    "copies and look-ups": ("",),
}
ENGINE_FLAGS = (
    *("max_running", "max_batch_tokens", "page_size", "kv_tokens", "memory_fraction"),
    *("graph", "graph_max_batch", "graph_max_tokens", "overlap"),
)


def main() -> None:
    parser = cli.parser(__doc__, *ENGINE_FLAGS)
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and number of requests (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="runs; all are shown (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        raise UserError("--scale takes a number above 0 and at most 1")
    engine = build_engine(cli.config(args))
    items = workload.offline(args.scale, engine.model.vocab_size)[: max(1, round(256 * args.scale))]
    params = [SamplingParams(temperature=0.6, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    engine.generate([item.prompt_ids for item in items[:8]], SamplingParams(temperature=0.6, max_tokens=8))  # warm
    rows = []
    for _ in range(args.rounds):
        steps = engine.stats().steps
        synchronize(engine.device)
        start = time.perf_counter()
        engine.generate([item.prompt_ids for item in items], params)
        seconds = time.perf_counter() - start
        tokens = sum(p.max_tokens for p in params)
        rows.append([tokens, round(seconds, 2), round(tokens / seconds), engine.stats().steps - steps])
    columns = ["output tokens", "seconds", "output tokens/s", "steps"]
    report.table(f"{args.model}, {len(items)} requests", columns, rows)
    data = {"columns": columns, "rows": rows}
    if engine.device.type == "cuda":
        data |= step_parts(engine, args.dtype, items, params)
        report.table("Where a decode step of all of them goes", data["parts_columns"], data["parts"])
    if args.save:
        report.save(__file__, "offline", args, data)


def step_parts(engine: Engine, dtype: str, items: list[workload.Item], params: list[SamplingParams]) -> dict:
    """The parts of a step in which every request decodes, and what reading their bytes once would take."""
    uids = [engine.add(item.prompt_ids, p) for item, p in zip(items, params, strict=True)]
    while engine.scheduler.waiting or any(req.extend_len > 1 for req in engine.scheduler.running):
        engine.step()
    kernels = device_ms(profile_steps(engine, STEPS), STEPS)
    context = sum(req.cached_len for req in engine.scheduler.running)
    for uid in uids:
        engine.abort(uid)
    while engine.has_work():
        engine.step()
    layers, head = parameters(engine.model)
    size = resolve_dtype(dtype, engine.device).itemsize  # bytes of a weight, and of an element of K or V
    floors = {
        "attention": context * engine.model.kv_bytes_per_token(size),
        "matrix products of the layers": layers * size,
        "head": head * size,
    }
    rows, left = [], dict(kernels)
    for part, prefixes in PARTS.items():
        mine = [name for name in left if name.startswith(prefixes)]
        floor = round(1e3 * floors[part] / READ, 3) if part in floors else ""
        rows.append([part, round(sum(left.pop(name) for name in mine), 3), floor])
    rows.append(["all", round(sum(kernels.values()), 3), round(1e3 * sum(floors.values()) / READ, 3)])
    return {"parts_columns": ["part", "ms per step", "floor, ms"], "parts": rows, "context": context}


if __name__ == "__main__":
    cli.run(main)
