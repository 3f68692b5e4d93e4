"""The small operations between the matrix products, in plain PyTorch. Shapes: [T, ...], one row a token."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]; statistics in float32 (Zhang & Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its norm: (x + delta, rms_norm(x + delta))."""
    x = x + delta
    return x, rms_norm(x, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) in the half-split layout: x [T, H, D], cos and sin [T, 1, D].

    sin carries the sign of the rotation: its first half is negated.
    """
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
