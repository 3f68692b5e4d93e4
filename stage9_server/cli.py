"""The flags of the server, and what users of SGLang and vLLM type in their place."""

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq

from common import cli
from common.config import UserError, check_range
from stage9_server.guard.guard import Limits
from stage9_server.inspector.routes import add_flag
from stage9_server.observe.logs import LEVELS
from stage9_server.openai_api.tools import FORMATS

KEY_VARIABLE = "SGLANG_ZERO_KEY"  # of the environment: the key that a server asks for, and that a client gives
ENGINE_FLAGS = tuple(cli.FIELDS)
SERVER_FLAGS = {  # flag -> (type, default, range, help)
    "host": (str, "127.0.0.1", (), "address to listen at; 0.0.0.0 is open to the network"),
    "port": (int, 8000, (0, 65535), "TCP port; 0: any that is free"),
    "tokenizers": (int, 1, (1, 64), "tokenizer processes"),
    "api-key": (
        str,
        None,
        (),
        f"clients must send this key; in the environment as {KEY_VARIABLE} no other user sees it",
    ),
    "max-queue": (int, 1024, (1,), "sequences that may wait for the engine; beyond that clients get status 503"),
    "max-concurrent": (int, Limits.max_concurrent, (1,), "sequences in flight; beyond that clients get status 429"),
    "max-logprobs": (
        *(int, Limits.max_logprobs, (1,)),
        "log-probabilities in answers under way, 300 bytes each; beyond that clients get status 429",
    ),
    "max-body-bytes": (int, Limits.max_body_bytes, (1,), "size of a request; beyond that clients get status 413"),
    "client-seconds": (
        *(float, Limits.client_seconds, (0.1,)),
        "time for a client to send its request, or to go on reading; then its connection is closed",
    ),
    "drain-seconds": (float, 5.0, (0,), "time for open answers at the end, before they are broken off"),
}
LISTS = {  # flag -> help; it takes several words
    "served-model-name": "names under which clients know the model (default: what --model says)",
    "cors-origin": "origins whose web pages may call the server, such as http://localhost:3000; * for all (default: none)",
}
# What SGLang or vLLM call it -> what it is called here.
RENAMED = {
    "--model-path": "--model", "--context-length": "--max-model-len", "--max-running-requests": "--max-running",
    "--max-num-seqs": "--max-running", "--chunked-prefill-size": "--max-batch-tokens",
    "--max-num-batched-tokens": "--max-batch-tokens", "--block-size": "--page-size", "--max-total-tokens": "--kv-tokens",
    "--mem-fraction-static": "--memory-fraction", "--gpu-memory-utilization": "--memory-fraction", "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp", "-tp": "--tp", "--cuda-graph-max-bs": "--graph-max-batch", "--random-seed": "--seed",
    "--disable-cuda-graph": "--no-graph", "--enforce-eager": "--no-graph", "--disable-radix-cache": "--no-radix",
    "--no-enable-prefix-caching": "--no-radix", "--enable-prefix-caching": "--radix", "--attention-backend": "--attn",
    "--disable-overlap-schedule": "--no-overlap", "--no-async-scheduling": "--no-overlap",
    "--max-queued-requests": "--max-queue", "--tokenizer-worker-num": "--tokenizers", "--log-level-http": "--log-level",
    "--uvicorn-log-level": "--log-level", "--allowed-origins": "--cors-origin",
}  # fmt: skip
INSTEAD = {  # likewise, where a name alone won't do
    "--schedule-policy": "use --order, fcfs or prefix (which SGLang calls lpm)",
    "--dp-size": "start several servers, and sglang-router in front of them",
    "--data-parallel-size": "start several servers, and sglang-router in front of them",
    "--quantization": "weights are used in the type that --dtype says",
    "--tokenizer-path": "the tokenizer is the checkpoint's own",
    "--tokenizer": "the tokenizer is the checkpoint's own; --tokenizers N is the number of processes for it",
    "--reasoning-parser": "leave it out: templates that know <think> are recognised",
    "--enable-auto-tool-choice": "leave it out: tools are always there",
    "--trust-remote-code": "leave it out: code of a checkpoint is never run",
    "--enable-metrics": "leave it out: /metrics is always there",
}


def parser(description: str) -> argparse.ArgumentParser:
    result = cli.parser(description, flags=ENGINE_FLAGS)
    for name, (kind, default, _, text) in SERVER_FLAGS.items():
        result.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    for name, text in LISTS.items():
        result.add_argument(f"--{name}", nargs="+", default=[], help=text)
    levels = "what is logged: info has a line per request, warning what is wrong with one"
    result.add_argument("--log-level", choices=LEVELS, default="warning", help=f"{levels} (default: warning)")
    add_flag(result)
    result.add_argument("--tool-call-parser", choices=FORMATS, help="of the model (default: as its chat template says)")
    without = "protect the server against the world; without it, only for experiments"
    result.add_argument("--guard", action=argparse.BooleanOptionalAction, default=True, help=f"{without} (default: on)")
    return result


def translated(words: Sequence[str]) -> list[str]:
    """A command line in which others' flags are ours. UserError if there is nothing like it."""
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in INSTEAD:
            raise UserError(f"{flag} is not known here; {INSTEAD[flag]}")
        result.append(RENAMED.get(flag, flag) + equals + value)
    return result


def parse(description: str, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked flags. UserError for what is wrong with them. The key is taken out of the environment: workers need it not."""
    args = parser(description).parse_args(translated(sys.argv[1:] if words is None else words))
    for name, (_, _, limits, _) in SERVER_FLAGS.items():
        if limits:
            check_range(f"--{name}", getattr(args, name.replace("-", "_")), *limits)
    cli.config(args)  # raises what is wrong with it
    key = os.environ.pop(KEY_VARIABLE, None)
    args.api_key = key if args.api_key is None else args.api_key
    if args.api_key == "":
        raise UserError(
            f"the key is empty, which would let every client in; give one, or no --api-key and {KEY_VARIABLE}"
        )
    args.served_model_name = args.served_model_name or [args.model]
    return args


def listener(host: str, port: int) -> socket.socket:
    """A socket that has the port but takes no connections yet. Raises UserError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        result = socket.socket(family, kind, protocol)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind(where)
    except (OSError, OverflowError) as error:
        raise UserError(f"can't listen at {host} port {port}: {error}; choose another --host or --port") from error
    return result


@contextmanager
def private_folder() -> Iterator[str]:
    """For the processes' sockets, which are removed with it. Raises UserError."""
    try:
        folder = tempfile.mkdtemp(prefix="sglang-zero-")
    except OSError as error:
        raise UserError(f"no folder for temporary files: {error}; set TMPDIR to one that has room") from error
    try:
        yield folder
    except zmq.ZMQError as error:
        raise UserError(f"no sockets in {folder}: {error}; set TMPDIR to a shorter path") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop_signal(kill: Callable[[], None], folder: str) -> asyncio.Event:
    """Set by the first signal that asks the server to end. The second ends it at once."""
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            kill()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(130)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return asked
