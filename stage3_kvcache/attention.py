"""Attention with a cache: store the new keys and values, then look at all of them."""

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from common.kernels import Kernels
from stage2_req.attention import cu_seqlens
from stage2_req.req import Batch
from stage3_kvcache.kv_pool import KVCachePool


class CachedAttention:
    """One request. Prefill: many queries, compute-bound. Decode: one query, bound by reading the cache."""

    def __init__(self, kernels: Kernels, pool: KVCachePool, device: torch.device):
        self.kernels, self.pool, self.device = kernels, pool, device

    def plan(self, batch: Batch) -> None:
        self.rows = batch.positions  # position p lies in row p
        self.new, self.end = int(batch.lens[0]), int(batch.ends[0])
        self.cu_q, self.cu_k = cu_seqlens(batch.lens, self.device), cu_seqlens(batch.ends, self.device)
        self.seqlens = upload(batch.ends.astype(np.int32), self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        self.pool.store(layer, self.rows, k, v)
        k, v = self.pool.k[layer][: self.end], self.pool.v[layer][: self.end]
        if self.new == 1:
            decode = self.kernels.flash_attn_with_kvcache
            return decode(q[:, None], k[None], v[None], cache_seqlens=self.seqlens, causal=True)[:, 0]
        prefill = self.kernels.flash_attn_varlen_func
        return prefill(q, k, v, self.cu_q, self.cu_k, self.new, self.end, causal=True)
