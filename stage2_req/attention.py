"""Attention of a step that brings all its keys and values along."""

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from common.kernels import Kernels
from stage2_req.req import Batch


def cu_seqlens(lens: np.ndarray, device: torch.device) -> Tensor:
    """Lengths [B] to the boundaries [B + 1] int32 that flash-attn wants: 0, l0, l0 + l1, …"""
    return upload(np.concatenate(([0], lens)).cumsum(dtype=np.int32), device)


class FullAttention:
    """Causal attention among the tokens of the step, each request by itself."""

    def __init__(self, kernels: Kernels, device: torch.device):
        self.attend, self.device = kernels.flash_attn_varlen_func, device

    def plan(self, batch: Batch) -> None:
        self.cu, self.longest = cu_seqlens(batch.lens, self.device), int(batch.lens.max())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        return self.attend(q, k, v, self.cu, self.cu, self.longest, self.longest, causal=True)
