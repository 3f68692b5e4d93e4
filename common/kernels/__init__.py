"""The two attention functions of flash-attn, under its own names and signatures, and who implements them.

`flash_attn_varlen_func` serves steps with many new tokens, `flash_attn_with_kvcache` those of one token a request.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config import UserError
from common.kernels import portable

KERNELS = ("auto", "portable", "flash")


@dataclass(frozen=True)
class Kernels:
    name: str
    flash_attn_varlen_func: Callable
    flash_attn_with_kvcache: Callable


def select_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """`auto` is flash-attn where it can run, else portable. Raises UserError for what can't run here."""
    obstacle = _flash_obstacle(device, dtype)
    if name == "flash" and obstacle:
        raise UserError(f"--attn flash needs {obstacle}; use --attn portable")
    if name == "flash" or (name == "auto" and not obstacle):
        name = "flash"
        from common.kernels import flash as module
    elif name in KERNELS:
        module, name = portable, "portable"
    else:
        raise UserError(f"attention kernel {name!r} is unknown; use {', '.join(KERNELS)}")
    return Kernels(name, module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "dtype float16 or bfloat16"
    if importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package (pip install -r requirements-gpu.txt)"
    return None
