"""Attention with a cache: store the new keys and values, then look at all of them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.kernels import Kernels
from stage2_req.attention import cu_seqlens
from stage2_req.req import Batch, upload
from stage3_kvcache.kv_pool import KVCachePool


@dataclass(frozen=True, eq=False)
class CachedMetadata:
    """Of one request."""

    out_loc: Tensor  # [T] slots of the new tokens
    extend_len: int
    seq_len: int
    cu_seqlens_q: Tensor  # [2] int32
    cu_seqlens_k: Tensor
    cache_seqlens: Tensor  # [1] int32


class CachedAttention:
    """One request. Prefill: many queries, compute-bound. Decode: one query, bound by reading the cache."""

    def __init__(self, kernels: Kernels, pool: KVCachePool, device: torch.device):
        self.kernels, self.pool, self.device = kernels, pool, device

    def plan(self, batch: Batch) -> CachedMetadata:
        return CachedMetadata(
            out_loc=upload(batch.positions(), self.device),  # position p lies in slot p
            extend_len=int(batch.extend_lens[0]),
            seq_len=int(batch.seq_lens[0]),
            cu_seqlens_q=cu_seqlens(batch.extend_lens, self.device),
            cu_seqlens_k=cu_seqlens(batch.seq_lens, self.device),
            cache_seqlens=upload(batch.seq_lens.astype(np.int32), self.device),
        )

    def __call__(self, metadata: CachedMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        m, k_pool, v_pool = metadata, self.pool.k[layer], self.pool.v[layer]
        self.kernels.ops.store_kv(k_pool, v_pool, m.out_loc, k, v)
        k, v = k_pool[: m.seq_len], v_pool[: m.seq_len]
        if m.extend_len == 1:
            decode = self.kernels.flash_attn_with_kvcache
            return decode(q[:, None], k[None], v[None], cache_seqlens=m.cache_seqlens, causal=True)[:, 0]
        prefill = self.kernels.flash_attn_varlen_func
        return prefill(q, k, v, m.cu_seqlens_q, m.cu_seqlens_k, m.extend_len, m.seq_len, causal=True)
