"""Decode speed of one stream: this engine against Hugging Face `generate` with its cache, in turns, same threads.

python stage3_kvcache/bench_hf.py --dtype float32 bfloat16
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import cli, report
from common.device import resolve_device, resolve_dtype
from common.fetch import resolve_model
from common.tokenizer import load_tokenizer
from stage2_req.params import SamplingParams
from stage3_kvcache.build import build_engine


def main() -> None:
    parser = cli.parser(__doc__, flags=("model", "device", "attn", "save"))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="one or several (default: both)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a run (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns; the fastest counts (default: 3)")
    args = parser.parse_args()
    rows = [compare(args, dtype) for dtype in args.dtype]
    report.table("One stream, decode", ["dtype", "Hugging Face tok/s", "this engine tok/s", "ratio", "same text"], rows)
    if args.save:
        report.save(__file__, "hf", args, {"rows": rows})


def compare(args, dtype: str) -> list:
    from transformers import AutoModelForCausalLM

    engine = build_engine(cli.config(args, dtype=dtype))
    device = resolve_device(args.device)
    hf = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model), trust_remote_code=False, dtype=resolve_dtype(dtype, device)
    ).to(device)
    prompt = load_tokenizer(args.model).chat([{"role": "user", "content": "What is gravity?"}])
    ids = torch.tensor([prompt], device=device)

    def run_hf(tokens):
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return hf.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()

    def run_ours(tokens):
        return engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0].output_ids

    best = {}
    for runner in (run_hf, run_ours) * args.rounds:
        runner(2)  # warm
        short = timed(lambda runner=runner: runner(1))  # prefill
        best[runner] = min(best.get(runner, 1e9), timed(lambda runner=runner: runner(args.tokens)) - short)
    theirs, ours = ((args.tokens - 1) / best[runner] for runner in (run_hf, run_ours))
    same = run_hf(args.tokens) == run_ours(args.tokens)
    return [dtype, round(theirs, 1), round(ours, 1), round(ours / theirs, 2), "yes" if same else "no"]


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    cli.run(main)
