"""native.c in Python's hands: the functions of ops.py and decode attention, each as one call into compiled code.

The source is compiled for this very CPU when it is first needed, in about two seconds, and kept in the user's cache. Where
there is no gcc, `load` returns None, and `portable` does the same with PyTorch's own operations.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from common.fetch import cache_dir
from common.kernels import portable
from common.kernels.ops import gumbel_argmax, store_kv  # noqa: F401 (the rest of what an ops module has)

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=gnu11")
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
MAX_HEAD = 512  # numbers in a head; native.c has registers for so many
SIGNATURES = {  # p: an address, n: a whole number, f: a float
    "linear": "ppppnnn",
    "add_rms_norm": "pppppnnf",
    "silu_and_mul": "ppnn",
    "qk_norm_rope": "pppppnnnnf",
    "decode_attention": "pppppppp" + 9 * "n" + "f",
}

flash_attn_varlen_func = portable.flash_attn_varlen_func


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for this dtype, compiled if need be; None where that can't be done."""
    compiler = shutil.which("gcc")
    if dtype not in DTYPES or compiler is None:
        return None
    # PyTorch's own OpenMP: with a second one there would be two pools of threads, waiting for work on the same cores
    openmp = [str(file) for file in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")] or ["-lgomp"]
    flags = (*FLAGS, *DTYPES[dtype])
    key = repr((SOURCE.read_bytes(), flags, openmp, torch.__version__, _cpu(), os.path.realpath(compiler)))
    library = cache_dir() / "native" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                for command in (  # linked without -ffast-math, which would round this process's smallest numbers to 0
                    (compiler, *flags, "-c", SOURCE, "-o", "native.o"),
                    (compiler, "-shared", "native.o", *openmp, "-lm", "-o", "native.so"),
                ):
                    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
                os.replace(Path(folder) / "native.so", library)
        except (OSError, subprocess.SubprocessError):
            return None
    try:
        result = ctypes.CDLL(str(library))
    except OSError:
        return None
    for name, types in SIGNATURES.items():
        getattr(result, name).argtypes = [
            {"p": ctypes.c_void_p, "n": ctypes.c_long, "f": ctypes.c_float}[t] for t in types
        ]
    return result


def _cpu() -> str:
    """What the code is compiled for: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


class NativeLinear(nn.Module):
    """As cpu_linear.HalfBytesLinear, which says why: x [T, in] -> [T, out], weights in float16, products and sums in float32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.library = load(torch.float32)
        self.size, width = linear.out_features, self.library.panel_width()
        weight = linear.weight.detach().half()
        weight = nn.functional.pad(weight, (0, 0, 0, -self.size % width))
        self.weight = weight.unflatten(0, (-1, width)).transpose(1, 2).contiguous()  # [panels, in, width]
        self.bias = linear.bias.detach().float() if linear.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().contiguous()
        out = torch.empty(x.shape[0], self.size)
        bias = None if self.bias is None else self.bias.data_ptr()
        self.library.linear(wide.data_ptr(), self.weight.data_ptr(), bias, out.data_ptr(), *x.shape, self.size)
        return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, out = x.contiguous(), torch.empty_like(x)
    size = x.shape[-1]
    load(x.dtype).add_rms_norm(
        x.data_ptr(), None, weight.data_ptr(), None, out.data_ptr(), x.numel() // size, size, eps
    )
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    tensors = (t.data_ptr() for t in (x, delta, weight, total, out))
    load(x.dtype).add_rms_norm(*tensors, x.numel() // size, size, eps)
    return total, out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    load(gate_up.dtype).silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


def qk_norm_rope(
    heads: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (None if weight is None else weight.data_ptr() for weight in (q_weight, k_weight))
    sizes = len(heads), num_heads, num_kv_heads, heads.shape[2]
    load(heads.dtype).qk_norm_rope(heads.data_ptr(), *weights, cos.data_ptr(), sin.data_ptr(), *sizes, eps)
    return heads.split((num_heads, num_kv_heads, num_kv_heads), 1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """As portable's, which also serves what the compiled one does not: several new tokens per request, huge heads."""
    batch, sq, num_heads, size = q.shape
    if sq > 1 or size > MAX_HEAD:
        lens, table = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx}, {"block_table": block_table}
        return portable.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **lens, **table, causal=causal)
    if block_table is None:
        block_table = torch.arange(batch, dtype=torch.int32) if cache_batch_idx is None else cache_batch_idx.int()
        block_table = block_table[:, None]
    new = (None, None) if k is None else (k.data_ptr(), v.data_ptr())
    out = q.new_empty(batch, 1, num_heads, size)
    load(q.dtype).decode_attention(
        *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), *new),
        *(cache_seqlens.data_ptr(), block_table.data_ptr(), out.data_ptr()),
        *(batch, num_heads, k_cache.shape[2], size, k_cache.shape[1]),
        *(q.stride(0), *((0, 0) if k is None else (k.stride(0), v.stride(0))), block_table.stride(0), size**-0.5),
    )
    return out
