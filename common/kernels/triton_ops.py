"""The small operations between the matrix products, each as one Triton kernel (see ops.py for the plain ones).

In PyTorch a rotary embedding alone is five kernels. At one token per request each of them costs a launch and next to no
work; at thousands of tokens each costs a trip through memory. Here every value is read once and written once, and
arithmetic is float32 in between. All of them can be captured in CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import pdl, wait_for_the_kernel_before
from common.kernels.triton_sample import gumbel_argmax  # noqa: F401 (the last of the small operations)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]; statistics in float32."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, warps = _row_shape(x.shape[-1])
    _rms_norm[(len(rows),)](
        rows,
        rows,
        weight,
        rows,
        out,
        eps,
        rows.stride(0),
        0,
        DIM=x.shape[-1],
        BLOCK=block,
        ADD=False,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its norm: (x + delta, rms_norm(x + delta)); x and delta [..., D]."""
    rows, deltas = x.reshape(-1, x.shape[-1]), delta.reshape(-1, x.shape[-1])
    total, out = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    block, warps = _row_shape(x.shape[-1])
    _rms_norm[(len(rows),)](
        rows, deltas, weight, total, out, eps, rows.stride(0), deltas.stride(0),
        DIM=x.shape[-1], BLOCK=block, ADD=True, num_warps=warps, **pdl(x.device),
    )  # fmt: skip
    return total, out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up."""
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    grid = (tokens * triton.cdiv(size, block),)
    _silu_and_mul[grid](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block, num_warps=4, **pdl(out.device))
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
    """What lies between the qkv projection and attention: norms of query and key heads, then the rotary embedding.

    heads [T, Hq + 2 Hkv, D] is overwritten. q_weight and k_weight [D], or None for models without these norms; cos and
    sin [T, 1, D] in the half-split layout, sin's first half negated. Returns views: q [T, Hq, D], k and v [T, Hkv, D].
    """
    tokens, _, dim = heads.shape
    block = 8  # heads: 8 x 128 values give 128 threads one 16-byte load each
    _qk_norm_rope[(tokens * triton.cdiv(num_heads + num_kv_heads, block),)](
        heads, q_weight, k_weight, cos, sin, eps, *heads.stride()[:2], cos.stride(0), sin.stride(0),
        Q_HEADS=num_heads, HEADS=num_heads + num_kv_heads, HALF=dim // 2, BLOCK_HALF=triton.next_power_of_2(dim // 2),
        BLOCK=block, NORM=q_weight is not None, num_warps=4, **pdl(heads.device),
    )  # fmt: skip
    return heads.split((num_heads, num_kv_heads, num_kv_heads), 1)


def store_kv(k_pool: Tensor, v_pool: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    """k_pool[out_loc], v_pool[out_loc] = k, v. k and v [T, Hkv, D], pools [num_tokens, Hkv, D]; out_loc [T] slots, < 0: skip."""
    size = k[0].numel()
    for t in (k, v, k_pool, v_pool):
        assert t.stride(2) == 1 and t.stride(1) == t.shape[2], "a token's heads lie side by side"
    block, warps = _row_shape(size)
    _store_kv[(len(out_loc),)](
        k_pool, v_pool, out_loc, k, v, k_pool.stride(0), v_pool.stride(0), k.stride(0), v.stride(0),
        SIZE=size, BLOCK=block, num_warps=warps, **pdl(k.device),
    )  # fmt: skip


def _row_shape(size: int) -> tuple[int, int]:
    """(block, warps) of a program that holds one row: 8 values a thread make one 16-byte load, up to 16 warps."""
    block = triton.next_power_of_2(size)
    return block, min(max(block // 256, 1), 16)


@triton.jit
def _rms_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, eps, x_row, delta_row,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_the_kernel_before()
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = dims < DIM
    x = tl.load(x_ptr + row * x_row + dims, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * delta_row + dims, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)  # the norm sees the sum as it is stored
        tl.store(total_ptr + row * DIM + dims, x, mask=mask)
    x = x.to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * weight.to(tl.float32)
    tl.store(out_ptr + row * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_for_the_kernel_before()
    blocks = tl.cdiv(SIZE, BLOCK)
    row, at = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_rope(
    heads_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, eps, stride_token, stride_head, cos_row, sin_row,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token, as two halves [BLOCK, HALF], because the rotation mixes one half with the other."""
    if PDL:
        wait_for_the_kernel_before()
    blocks = tl.cdiv(HEADS, BLOCK)
    token = tl.program_id(0).to(tl.int64) // blocks
    head = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    is_dim = dims < HALF
    mask = (head < HEADS) & is_dim
    low_ptr = heads_ptr + token * stride_token + head * stride_head + dims
    low = tl.load(low_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_ptr += token * cos_row + dims
    sin_ptr += token * sin_row + dims
    cos_low = tl.load(cos_ptr, mask=is_dim, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + HALF, mask=is_dim, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr, mask=is_dim, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + HALF, mask=is_dim, other=0.0).to(tl.float32)
    if NORM:
        weight_ptr = tl.where(head < Q_HEADS, q_weight_ptr, k_weight_ptr) + dims
        mean = tl.sum(low * low + high * high, 1, keep_dims=True) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)
        low *= scale * tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        high *= scale * tl.load(weight_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    tl.store(low_ptr, (low * cos_low + high * sin_low).to(dtype), mask=mask)
    tl.store(low_ptr + HALF, (high * cos_high + low * sin_high).to(dtype), mask=mask)


@triton.jit
def _store_kv(
    k_pool_ptr, v_pool_ptr, out_loc_ptr, k_ptr, v_ptr, k_pool_row, v_pool_row, k_row, v_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_the_kernel_before()
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(out_loc_ptr + token).to(tl.int64)
    mask = (at < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_row + at, mask=mask)
    v = tl.load(v_ptr + token * v_row + at, mask=mask)
    tl.store(k_pool_ptr + slot * k_pool_row + at, k, mask=mask)
    tl.store(v_pool_ptr + slot * v_pool_row + at, v, mask=mask)
