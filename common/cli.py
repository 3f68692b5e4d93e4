"""The flags that the run.py files share, and how they end."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable

from common.config import DEVICE_DEFAULTS, DTYPES, KERNELS, EngineConfig, UserError

# flag -> (type, help); the defaults are EngineConfig's
FLAGS = {
    "model": (str, "smollm2-135m, a folder in Hugging Face's layout, a hub id, or dummy:NAME for random weights"),
    "device": (str, "auto, cpu, cuda or cuda:N"),
    "dtype": (str, f"auto, {', '.join(DTYPES)}"),
    "attn": (str, f"attention kernels: {', '.join(KERNELS)}"),
    "max_model_len": (
        int,
        "longest sequence in tokens, prompt and output together; never more than the model was made for",
    ),
    "max_running": (int, "requests that compute at the same time"),
    "max_batch_tokens": (int, "positions computed in one step; longer prompts come in chunks of this"),
    "page_size": (int, "tokens in a page of the KV pool"),
    "kv_tokens": (int, "size of the KV pool in tokens; on a GPU by default what is free"),
    "memory_fraction": (
        float,
        "share of a GPU's memory for weights, KV pool and the largest step; CUDA graphs come on top",
    ),
    "graph": (bool, "replay steps from CUDA graphs"),
    "graph_max_batch": (int, "requests that decode in the largest CUDA graph"),
    "graph_max_tokens": (int, "positions in the largest CUDA graph of a step with prompts; 0: record no such steps"),
    "overlap": (bool, "schedule the next step while the device computes this one"),
    "radix": (bool, "keep the prefixes of earlier requests and share them"),
    "tp": (int, "ranks that share the model (tensor parallelism)"),
    "order": (str, "of the waiting queue: fcfs, or prefix for the longest known prefix first"),
    "seed": (int, "decides the draws of requests that bring no seed"),
}
COMMON = ("model", "device", "dtype", "attn", "max_model_len", "seed", "save")


def parser(description: str, *extra: str, flags: tuple[str, ...] = COMMON) -> argparse.ArgumentParser:
    """A parser with the common flags and some extra ones. `save` is a switch: write a record and the plots."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for flag in (*flags, *extra):
        if flag == "save":
            result.add_argument(
                "--save", action="store_true", help="write the record and the plots to this stage's results/"
            )
        else:
            kind, text = FLAGS[flag]
            by_device = {name: values[flag] for name, values in DEVICE_DEFAULTS.items() if values.get(flag) is not None}
            default = ", ".join(f"{value} on {name}" for name, value in by_device.items()) or defaults[flag]
            how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            name, text = f"--{flag.replace('_', '-')}", f"{text} (default: {default})"
            result.add_argument(name, default=defaults[flag], help=text, **how)
    return result


def config(args: argparse.Namespace, **changes) -> EngineConfig:
    """The EngineConfig that the flags describe."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{key: value for key, value in vars(args).items() if key in known} | changes)


def leave(status: int) -> None:
    """End the process without the interpreter's own farewell, which takes PyTorch a second or two."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(main: Callable[[], None]) -> None:
    """Run a script's main. A UserError is one line and status 2; Ctrl-C is status 130 without a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
