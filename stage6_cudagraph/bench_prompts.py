"""What capturing steps with prompts brings: the first token of a prompt alone, and the steps of requests that decode beside prompts.

python stage6_cudagraph/bench_prompts.py
"""

import gc
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report
from common.config import DUMMY_MODELS, EngineConfig, UserError
from common.device import resolve_device
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage6_cudagraph.build import build_engine
from stage6_cudagraph.run import stop

LENGTHS, TIMES = (100, 500, 1000), 9
RUNNING, CONTEXT, NEWCOMER, EVERY, STEPS = 64, 200, 128, 4, 80
WAYS = {"launched": 0, "replayed": EngineConfig.graph_max_tokens}
COLUMNS = [
    "model",
    "steps with prompts are",
    *(f"first token of {n:,}, ms" for n in LENGTHS),
    "mean step, ms",
    "longest, ms",
]


def main() -> None:
    parser = cli.parser(__doc__, flags=("device", "save"))
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama3-8b"], choices=[*DUMMY_MODELS])
    args = parser.parse_args()
    if resolve_device(args.device).type == "cpu":
        raise UserError("this benchmark compares CUDA graphs with launches and needs a GPU")
    rows = []
    for name in args.models:
        for way, largest in WAYS.items():
            engine = build_engine(
                EngineConfig(f"dummy:{name}", args.device, max_model_len=2048, graph_max_tokens=largest)
            )
            rng = np.random.default_rng(0)
            for _ in range(2):  # the first time compiles kernels
                row = [*(round(first_token(engine, rng, n), 2) for n in LENGTHS), *steps_beside_prompts(engine, rng)]
            rows.append([name, way, *row])
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    report.table(f"Alone; and {RUNNING} decodes, with a prompt of {NEWCOMER} every {EVERY} steps", COLUMNS, rows)
    if args.save:
        report.save(__file__, "prompts", args, {"columns": COLUMNS, "rows": rows})


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 10000, length).tolist()


def first_token(engine: Engine, rng: np.random.Generator, length: int) -> float:
    """Median milliseconds from `add` to the token, with no other request there."""
    times = []
    for _ in range(TIMES):
        ids = prompt(rng, length)
        start = time.perf_counter()
        engine.add(ids, SamplingParams(max_tokens=1))
        while not engine.step():
            pass
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def steps_beside_prompts(engine: Engine, rng: np.random.Generator) -> tuple[float, float]:
    """(mean, longest) milliseconds of a step."""
    for _ in range(RUNNING):
        engine.add(prompt(rng, CONTEXT), SamplingParams(temperature=0.6, max_tokens=1000, ignore_eos=True))
    for _ in range(20):
        engine.step()
    times = []
    for i in range(STEPS):
        if i % EVERY == 0:
            engine.add(prompt(rng, NEWCOMER), SamplingParams(temperature=0.6, max_tokens=EVERY, ignore_eos=True))
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    stop(engine)
    return round(1e3 * float(np.mean(times)), 2), round(1e3 * max(times), 2)


if __name__ == "__main__":
    cli.run(main)
