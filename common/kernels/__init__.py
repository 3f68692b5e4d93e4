"""The two attention functions of flash-attn, under its own names and signatures, and their implementations here.

`flash_attn_varlen_func` serves steps with many new tokens, `flash_attn_with_kvcache` those of one token per request.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from common.config import KERNELS, UserError
from common.kernels import ops, portable


@dataclass(frozen=True)
class Kernels:
    name: str
    flash_attn_varlen_func: Callable
    flash_attn_with_kvcache: Callable
    ops: ModuleType = ops  # the small operations
    block_multiple: int = 1  # a page has to be a multiple of this, in tokens
    captures_varlen: bool = True  # a CUDA graph can capture the first function: it reads no lengths back


def select_kernels(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """The kernels by name. Raises UserError for what can't run here.

    portable: PyTorch for everything. triton, native: our own for a GPU and for a CPU, for pages of any size. flash:
    flash-attn for both functions, to compare with. auto: our own where they run, else portable.
    """
    if name not in KERNELS:
        raise UserError(f"attention kernel {name!r} is unknown; use {', '.join(KERNELS)}")
    automatic = name == "auto"
    if automatic:
        name = "native" if device.type == "cpu" else "triton"
    if obstacle := _obstacle(name, device, dtype, head_dim):
        if not automatic:
            raise UserError(f"--attn {name} needs {obstacle}; use --attn portable")
        name = "portable"
    if name == "portable":
        functions = portable.flash_attn_varlen_func, portable.flash_attn_with_kvcache
        return Kernels(name, *functions, captures_varlen=device.type != "cuda")
    if name == "native":
        from common.kernels import native

        return Kernels(name, native.flash_attn_varlen_func, native.flash_attn_with_kvcache, native)
    from common.kernels import triton_ops

    if name == "flash":
        from common.kernels import flash

        return Kernels(name, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache, triton_ops, 256)
    from common.kernels.triton_decode import flash_attn_with_kvcache
    from common.kernels.triton_prefill import flash_attn_varlen_func

    return Kernels(name, flash_attn_varlen_func, flash_attn_with_kvcache, triton_ops)


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What these kernels need and don't have here."""
    match name:
        case "native":
            return _native_obstacle(device, dtype)
        case "triton":
            return _triton_obstacle(device)
        case "flash":
            return _triton_obstacle(device) or _flash_obstacle(device, dtype, head_dim)
    return None


def _flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return "dtype float16 or bfloat16"
    if importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package (pip install -r requirements-gpu.txt)"
    from common.kernels.flash import flash_attn_varlen_func

    one, bounds = torch.zeros(1, 1, head_dim, device=device, dtype=dtype), torch.tensor([0, 1], device=device).int()
    try:
        flash_attn_varlen_func(one, one, one, bounds, bounds, 1, 1, causal=True)
    except RuntimeError as error:  # a head size or a GPU that it was not built for
        return f"a build of it for head size {head_dim} and {torch.cuda.get_device_name(device)} ({error})"
    return None


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return "a CPU"
    from common.kernels import native

    if dtype not in native.DTYPES:
        return "dtype float32 or bfloat16"
    return None if native.load(dtype) and native.load(torch.float32) else "a C compiler (gcc) that can compile native.c"


def _triton_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "a GPU"
    return None if importlib.util.find_spec("triton") else "the triton package"


def speed_up_linears(model: nn.Module, kernels: Kernels, device: torch.device) -> None:
    """Replace the nn.Linear modules below `model` by ones that are faster on this device, where there are such."""
    if device.type == "cpu":
        from common.kernels.cpu_linear import pack_linears

        pack_linears(model, kernels.name)
    elif not _triton_obstacle(device):
        from common.kernels.triton_linear import speed_up_linears as replace

        replace(model)
