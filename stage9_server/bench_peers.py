"""This engine, vLLM, SGLang and nano-vllm on one GPU, one after the other: the `offline` workload, token ids in and out on all
sides; and their servers, cold and warm. Each of the others needs a folder of installed packages, or it is left out:

python stage9_server/bench_peers.py offline --site vllm=FOLDER --site sglang=FOLDER --site nano-vllm=FOLDER --save
python stage9_server/bench_peers.py online --site vllm=FOLDER --save
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from common import cli, report, workload
from common.config import UserError
from common.device import resolve_device
from stage9_server import load
from stage9_server.peers import DUMMY, ENVIRONMENT, OFFLINE, SERVERS, TEMPERATURE

ROOT = Path(__file__).resolve().parents[1]
OURS = "this engine"
START_SECONDS = 400  # at most, for a server
RATE = 20.0  # requests per second
OFFLINE_COLUMNS = ["engine", "version", "shapes", "start, s", "round", "seconds", "output tokens/s"]
ONLINE_COLUMNS = [
    *("engine", "ready after, s", "round", "requests", "output tokens/s"),
    *("TTFT p50, ms", "TTFT p99, ms", "gap p50, ms", "gap p99, ms", "longest gap, ms"),
]


@dataclass(frozen=True)
class Round:
    name: str
    requests: int
    rate: float | None = None  # None: all at once


ROUNDS = (
    Round("the very first request", 1),
    Round("the next", 1),
    Round("the first 30, 20 per second", 30, RATE),
    Round("first burst", 256),
    Round("second burst", 256),
    Round("20 per second", 200, RATE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("offline", "online"))
    parser.add_argument("--site", action="append", default=[], metavar="ENGINE=FOLDER", help="where its packages are")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b"], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each engine, offline (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the record to results/")
    args = parser.parse_args()
    if resolve_device("auto").type != "cuda":
        raise UserError("this comparison needs a GPU; its record is results/h200-peers-offline.json and -online.json")
    sites = dict(site.partition("=")[::2] for site in args.site)
    if unknown := sites.keys() - OFFLINE.keys():
        raise UserError(f"there is no engine {min(unknown)!r}; there are {', '.join(list(OFFLINE)[1:])}")
    engines = [OURS, *(name for name in OFFLINE if name in sites)]
    for name in OFFLINE.keys() - set(engines):
        report.say(f"{name}: left out, no --site {name}=FOLDER")
    with tempfile.TemporaryDirectory() as temp:
        folders = {shape: SHAPES[shape](Path(temp, shape)) for shape in args.shapes}
        columns, rows = (offline if args.what == "offline" else online)(engines, sites, folders, args.rounds)
    report.table(args.what, columns, rows)
    if args.save:
        args.site = engines[1:]  # folders are of this machine
        report.save(__file__, f"peers-{args.what}", args, {"columns": columns, "rows": rows})


def offline(engines: list[str], sites: dict[str, str], folders: dict[str, str], rounds: int) -> tuple[list, list]:
    rows = []
    for shape, folder in folders.items():
        for name in [*engines, OURS]:  # twice this one, to see whether the machine has changed
            command = ["stage9_server/peers.py", name, folder, "--rounds", str(rounds)]
            with running(command, sites.get(name)) as (process, log):
                if process.wait():
                    report.say(f"{name} failed with {shape}:\n{tail(log)}")
                    continue
                log.seek(0)
                result = json.loads(next(line for line in log if line.startswith('{"version"')))
            for i, seconds in enumerate(result["rounds"], 1):
                speed = round(result["tokens"] / seconds)
                rows.append([name, result["version"], shape, round(result["start"], 1), i, round(seconds, 2), speed])
                report.say(" ".join(map(str, rows[-1])))
    return OFFLINE_COLUMNS, rows


def online(engines: list[str], sites: dict[str, str], folders: dict[str, str], rounds: int) -> tuple[list, list]:
    rows = []
    for folder in folders.values():
        for name in (name for name in engines if name in SERVERS):
            try:
                with serving(name, folder, sites.get(name)) as (url, seconds):
                    for i, round_ in enumerate(ROUNDS):
                        rows.append([name, round(seconds, 1), *measure(url, folder, i, round_)])
                        report.say(" ".join(map(str, rows[-1])))
            except UserError as error:
                report.say(str(error))
    return ONLINE_COLUMNS, rows


def environment(site: str | None) -> dict[str, str]:
    path = {"PYTHONPATH": site} if site else {}
    return os.environ | ENVIRONMENT | path


@contextlib.contextmanager
def serving(name: str, folder: str, site: str | None) -> Iterator[tuple[str, float]]:
    """(address, seconds until it was healthy)"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", *SERVERS[name], folder.removeprefix(DUMMY), "--port", str(port)]
    url, start = f"http://127.0.0.1:{port}", time.perf_counter()
    with running(command, site) as (process, log):
        while not healthy(url):
            if process.poll() is not None or time.perf_counter() > start + START_SECONDS:
                raise UserError(f"the server of {name} did not start:\n{tail(log)}")
            time.sleep(0.1)
        yield url, time.perf_counter() - start


@contextlib.contextmanager
def running(command: list[str], site: str | None) -> Iterator[tuple[subprocess.Popen, IO[str]]]:
    """(a Python process with the packages of `site`, what it prints); in the end it and all its processes are gone."""
    with tempfile.TemporaryFile("w+") as log:
        how = {"cwd": ROOT, "env": environment(site), "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *command], **how)
        try:
            yield process, log
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(2)  # until the device's memory is free again


def tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-1500:]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def measure(url: str, model: str, number: int, round_: Round) -> list:
    """One round's row. No two rounds have a prompt in common, so that no prefix cache helps."""
    bodies = []
    for item in workload.offline()[: round_.requests]:
        prompt = [(token + 1 + number) % 10_000 for token in item.prompt_ids]
        body = {"model": model, "prompt": prompt, "max_tokens": item.max_tokens}
        bodies.append(body | {"temperature": TEMPERATURE, "ignore_eos": True})
    replies = asyncio.run(load.offer(load.Server(url), "/v1/completions", bodies, rate=round_.rate))
    summary = load.summarize(replies)
    if summary.failed:
        raise UserError(
            f"{summary.failed} of {len(bodies)} requests failed: {next(r.error for r in replies if r.error)}"
        )
    ttft, gaps = summary.latencies["TTFT"], summary.latencies["ITL"]
    times = load.milliseconds([*np.percentile(ttft, (50, 99)), *np.percentile(gaps, (50, 99)), max(gaps)])
    return [round_.name, len(bodies), round(summary.throughput), *times]


# --- models: random weights, and a tokenizer that every engine can load -----------------------------------------------


def qwen3(folder: Path) -> str:
    """Qwen3-0.6B's shapes with random weights, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    return save_tokenizer(folder, config.vocab_size)


def llama3(folder: Path) -> str:
    """Llama-3-8B's shapes, without weights: every engine makes up its own."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    return DUMMY + save_tokenizer(folder, config.vocab_size)


def save_tokenizer(folder: Path, vocab_size: int) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    end = f"t{vocab_size - 1}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token=end).save_pretrained(folder)
    return str(folder)


SHAPES = {"qwen3-0.6b": qwen3, "llama3-8b": llama3}


if __name__ == "__main__":
    cli.run(main)
