"""Where tensors live: names to devices and dtypes."""

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.config import DTYPES, UserError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one. Raises UserError if the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} is not there: PyTorch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device type {device.type!r} is not supported; use cpu or cuda")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


DTYPE_VARIABLE = "SGLANG_ZERO_DTYPE"  # in the environment: what `auto` means; the tests run with either default


def cpu_multiplies_bfloat16() -> bool:
    """Does this CPU have instructions that multiply bfloat16?

    On x86, oneDNN's own `_is_mkldnn_bf16_supported` is no answer: it is True on every AVX-512 CPU, also where each
    product is emulated and takes three times as long as in float32.
    """
    if platform.machine() in ("arm64", "aarch64"):
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32 (several times faster there)."""
    if name == "auto":
        native = device.type == "cuda" or cpu_multiplies_bfloat16()
        name = os.environ.get(DTYPE_VARIABLE) or ("bfloat16" if native else "float32")
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return getattr(torch, name)


def synchronize(device: torch.device) -> None:
    """Wait for the device before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def timed_start(what: str, device: torch.device) -> Iterator[None]:
    """A part of an engine's start. On a GPU, where a start takes its time: one line on stderr says how long it took."""
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        synchronize(device)
        print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
