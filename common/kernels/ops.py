"""The small operations between the matrix products, in plain PyTorch; triton_ops.py has each as one GPU kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D] (Zhang & Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its norm: (x + delta, rms_norm(x + delta)); x and delta [..., D]."""
    x = x + delta
    return x, rms_norm(x, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


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

    heads [T, Hq + 2 Hkv, D] is given up: it may be overwritten. q_weight and k_weight [D], or None for models without
    these norms; cos and sin [T, 1, D] as `rope` wants them. Returns q [T, Hq, D], k and v [T, Hkv, D].
    """
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if q_weight is not None:
        q, k = qk.split((num_heads, num_kv_heads), 1)
        qk = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), 1)
    return *rope(qk, cos, sin).split((num_heads, num_kv_heads), 1), v


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) in the half-split layout: x [T, H, D], cos and sin [T, 1, D].

    sin carries the sign of the rotation: its first half is negated.
    """
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)


def store_kv(k_pool: Tensor, v_pool: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    """k_pool[out_loc], v_pool[out_loc] = k, v. k and v [T, Hkv, D], pools [num_tokens, Hkv, D], out_loc [T] int64 slots."""
    k_pool.index_copy_(0, out_loc, k)
    v_pool.index_copy_(0, out_loc, v)


def gumbel_argmax(logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """A draw from softmax(logits * inv_temperature) for each row: the argmax after Gumbel noise was added.

    logits [S, V]; inv_temperature [S] float32, 0 for a row without noise; key_low and key_high [S] int32, the halves
    of each row's key. Of equal ones the first. Returns [S] int64.
    """
    scale = inv_temperature[:, None]
    scores = torch.where(scale > 0, logits.float() * scale + gumbel(logits.shape[1], key_low, key_high), logits.float())
    return scores.argmax(-1)


def gumbel(size: int, key_low: Tensor, key_high: Tensor) -> Tensor:
    """Standard Gumbel noise [S, size], float32: a hash of (key, token), no generator.

    The hash is lowbias32 (C. Wellons) with 32 bits of the row's key on either side.
    """
    low, high = (key.int()[:, None] for key in (key_low, key_high))
    x = torch.arange(size, dtype=torch.int32, device=low.device).mul_(_int32(0x9E3779B1)) + low
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_(_shift_right(x, shift)).mul_(_int32(factor))
    x.bitwise_xor_(_shift_right(x, 16)).bitwise_xor_(high)
    uniform = x.view(torch.uint32).float().add_(0.5).mul_(2.0**-32)
    uniform.clamp_(max=1 - 2.0**-24)  # near 0, where the large noise comes from, a float is fine enough
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _int32(value: int) -> int:
    """The signed number with the same 32 bits: PyTorch multiplies signed integers only, and wraps them."""
    return value - (value >> 31 << 32)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """As if x were unsigned."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
