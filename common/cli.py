"""The flags that the run.py files share, and how they end."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import get_args, get_type_hints

from common.config import DEVICE_TYPES, EngineConfig, UserError

FIELDS = {field.name: field for field in fields(EngineConfig)}
KINDS = {name: (get_args(kind) or (kind,))[0] for name, kind in get_type_hints(EngineConfig).items()}  # without None
SAVE = "write the record and the plots to the stage's `results/`"
COMMON = ("model", "device", "dtype", "attn", "max_model_len", "seed", "save")


def parser(description: str, *extra: str, flags: tuple[str, ...] = COMMON) -> argparse.ArgumentParser:
    """A parser with the common flags and some extra ones. `save` is a switch: write a record and the plots."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in (*flags, *extra):
        if name == "save":
            result.add_argument("--save", action="store_true", help=SAVE.replace("`", ""))
            continue
        field, kind = FIELDS[name], KINDS[name]
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        same = field.default is not None
        shown = default(field, "cuda") if same else ", ".join(f"{d}: {default(field, d)}" for d in DEVICE_TYPES)
        shown = "auto" if field.default == "auto" else shown
        text = f"{field.metadata['help']} (default: {shown})".replace("`", "")
        result.add_argument(f"--{name.replace('_', '-')}", default=field.default, help=text, **how)
    return result


def default(field: Field, device: str) -> str:
    """A setting's default on a kind of device, as a person reads it."""
    if isinstance(words := field.metadata.get(device), str):
        return words
    value = field.metadata.get(device, field.default)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, str) else f"{value:,}"


def flag_table() -> list[str]:
    """The rows of the README's table: flag, meaning, default on a CPU, default on a GPU."""
    rows = []
    for name, field in FIELDS.items():
        flag = name.replace("_", "-")
        shown = f"`--{flag}`, `--no-{flag}`" if KINDS[name] is bool else f"`--{flag}`"
        rows.append((shown, field.metadata["help"], default(field, "cpu"), default(field, "cuda")))
    rows.append(("`--save`", SAVE, "off", "off"))
    return [f"| {' | '.join(cells)} |" for cells in rows]


def config(args: argparse.Namespace, **changes) -> EngineConfig:
    """The EngineConfig that the flags describe."""
    return EngineConfig(**{key: value for key, value in vars(args).items() if key in FIELDS} | changes)


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
