"""Two extremes against what the card can do: decode of a single stream (bytes), and prefill of 8 x 2,048 tokens (FLOPs).

python stage6_cudagraph/bench_limits.py
"""

import gc
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from common import cli, report
from common.config import DUMMY_MODELS, EngineConfig, ModelConfig, UserError
from common.device import resolve_device
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage6_cudagraph.build import build_engine

READ, MATMUL = 4.4e12, 790e12  # of an H200: bytes and bfloat16 FLOPs per second
PROMPTS, LENGTH, NEW = 8, 2048, 200


def main() -> None:
    parser = cli.parser(__doc__, flags=("device", "save"))
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama3-8b"], choices=[*DUMMY_MODELS])
    args = parser.parse_args()
    if resolve_device(args.device).type == "cpu":
        raise UserError("this benchmark compares with a GPU's limits and needs one")
    decode, prefill = [], []
    for name in args.models:
        config = EngineConfig(f"dummy:{name}", args.device, max_model_len=LENGTH + 1, max_batch_tokens=PROMPTS * LENGTH)
        engine = build_engine(config)
        decode.append([name, *single_stream(engine)])
        prefill.append([name, *long_prompts(engine)])
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    decode_columns = ["model", "ms per token", "floor, ms", "share of the floor, %"]
    prefill_columns = ["model", "ms", "TFLOP/s", "share of the matrix units, %"]
    report.table("Decode of one stream: every weight is read for every token", decode_columns, decode)
    report.table(f"Prefill of {PROMPTS} x {LENGTH} tokens", prefill_columns, prefill)
    if args.save:
        data = {
            "decode_columns": decode_columns,
            "decode": decode,
            "prefill_columns": prefill_columns,
            "prefill": prefill,
        }
        report.save(__file__, "limits", args, data)


def parameters(model: ModelConfig) -> tuple[int, int]:
    """Weights of the layers, and of the head."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layers = model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
    return layers, model.vocab_size * model.hidden_size


def single_stream(engine: Engine) -> list[float]:
    engine.add([1] * 100, SamplingParams(temperature=0.6, max_tokens=NEW + 50, ignore_eos=True))
    for _ in range(40):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NEW):
        engine.step()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - start) / NEW * 1e3
    while engine.has_work():
        engine.step()
    floor = 2 * sum(parameters(engine.model)) / READ * 1e3
    return [round(ms, 3), round(floor, 3), round(100 * floor / ms, 1)]


def long_prompts(engine: Engine) -> list[float]:
    times = []
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(0, 10000, (PROMPTS, LENGTH)).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(ids, SamplingParams(max_tokens=1))
        times.append(time.perf_counter() - start)
    model = engine.model
    layers, head = parameters(model)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * LENGTH**2  # causal: half of all pairs
    flops = 2 * layers * PROMPTS * LENGTH + 2 * head * PROMPTS + attention * PROMPTS
    best = min(times[1:])
    return [round(best * 1e3, 1), round(flops / best / 1e12), round(100 * flops / best / MATMUL, 1)]


if __name__ == "__main__":
    cli.run(main)
