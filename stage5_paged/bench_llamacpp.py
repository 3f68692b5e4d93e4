"""This engine against llama.cpp on the CPU, alternately in one run: prefill and decode of 1, 8 and 32 requests.

python stage5_paged/bench_llamacpp.py --llama-bin llama.cpp/build/bin --gguf smollm2-f16.gguf

How to get llama.cpp and the model in its format:

pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*.tar.gz
cd llama_cpp_python-*/vendor/llama.cpp
cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF && cmake --build build --target llama-batched-bench
PYTHONPATH=gguf-py python convert_hf_to_gguf.py FOLDER_OF_THE_MODEL --outtype f16 --outfile smollm2-f16.gguf
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import cli, report
from common.config import UserError
from common.device import resolve_dtype
from common.kernels import select_kernels
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine

PROMPT, OUTPUT = 128, 32  # tokens
REQUESTS = (1, 8, 32)
COLUMNS = ["tokens per second", "this engine", "llama.cpp", "ratio"]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder with llama-batched-bench")
    parser.add_argument("--gguf", type=Path, required=True, help="the same model as a GGUF file, in f16")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each, in turn; the best counts (default: %(default)s)"
    )
    args = parser.parse_args()
    tool = args.llama_bin / "llama-batched-bench"
    for file in (tool, args.gguf):
        if not file.is_file():
            raise UserError(f"there is no {file}; --help says how to get it")
    engine = build_engine(cli.config(args, max_running=max(REQUESTS), max_batch_tokens=512))
    best: dict[tuple[str, str, int], float] = {}
    for _ in range(args.rounds):
        for n in REQUESTS:
            for side, (prefill, decode) in (("ours", ours(engine, n)), ("theirs", theirs(tool, args.gguf, n))):
                for what, speed in (("prefill", prefill), ("decode", decode)):
                    best[what, side, n] = max(best.get((what, side, n), 0), speed)
    rows = []
    for what, label in (("prefill", f"prefill, {{}} x {PROMPT}"), ("decode", "decode, {}")):
        for n in REQUESTS:
            mine, other = best[what, "ours", n], best[what, "theirs", n]
            rows.append([label.format(n), round(mine), round(other), round(mine / other, 2)])
    report.table(f"{args.model}, {torch.get_num_threads()} threads, best of {args.rounds} rounds", COLUMNS, rows)
    if args.save:
        args.llama_bin, args.gguf = "", args.gguf.name  # paths are nobody's business
        dtype = resolve_dtype(args.dtype, engine.device)
        kernels = select_kernels(args.attn, engine.device, dtype, engine.model.head_dim).name
        report.save(__file__, "llamacpp", args, {"kernels": kernels, "columns": COLUMNS, "rows": rows})


def ours(engine: Engine, n: int) -> tuple[float, float]:
    """Tokens per second of prefill and of decode."""
    draw = random.Random(n)
    for _ in range(n):
        ids = [draw.randrange(engine.model.vocab_size) for _ in range(PROMPT)]
        engine.add(ids, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
    start, begun, tokens = time.perf_counter(), set(), 0
    while len(begun) < n:  # until the last prompt is done; the first ones decode beside it
        outputs = engine.step()
        begun |= {output.uid for output in outputs}
        tokens += len(outputs)
    first = time.perf_counter()
    while engine.has_work():
        engine.step()
    return n * PROMPT / (first - start), (n * OUTPUT - tokens) / (time.perf_counter() - first)


def theirs(tool: Path, gguf: Path, n: int) -> tuple[float, float]:
    sizes = ["-npp", PROMPT, "-ntg", OUTPUT, "-npl", n, "-c", 8192, "-b", 4096, "-t", torch.get_num_threads()]
    command = [*map(str, (tool, "-m", gguf, *sizes)), "--output-format", "jsonl"]
    found = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode or not lines:
        raise UserError(f"llama-batched-bench failed: {found.stderr.strip()[-300:]}")
    result = json.loads(lines[-1])
    return result["speed_pp"], result["speed_tg"]


if __name__ == "__main__":
    cli.run(main)
