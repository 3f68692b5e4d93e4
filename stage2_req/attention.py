"""Attention of a step that brings all its keys and values along."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.kernels import Kernels
from stage2_req.req import Batch, upload


@dataclass(frozen=True, eq=False)
class FullMetadata:
    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int


class FullAttention:
    """Causal attention among the tokens of the step, each request by itself."""

    def __init__(self, kernels: Kernels, device: torch.device):
        self.attend, self.device = kernels.flash_attn_varlen_func, device

    def plan(self, batch: Batch) -> FullMetadata:
        return FullMetadata(cu_seqlens(batch.extend_lens, self.device), int(batch.extend_lens.max()))

    def __call__(self, metadata: FullMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        bounds, longest = metadata.cu_seqlens, metadata.max_seqlen
        return self.attend(q, k, v, bounds, bounds, longest, longest, causal=True)


def cu_seqlens(lens: np.ndarray, device: torch.device) -> Tensor:
    """Lengths [B] to the boundaries [B + 1] int32 that flash-attn wants: 0, l0, l0 + l1, …"""
    return upload(np.concatenate(([0], lens)).cumsum(dtype=np.int32), device)
