"""Attention of a mixed step: decodes in one call, chunks of prompts in another, whatever the number of requests."""

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from common.kernels import Kernels
from stage2_req.attention import cu_seqlens
from stage2_req.req import Batch
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.cache import SlotCacheManager


class SlotAttention:
    """The first `num_decode` tokens of a step are decodes, one a request; the others are chunks, laid end to end."""

    def __init__(self, kernels: Kernels, pool: KVCachePool, cache: SlotCacheManager, device: torch.device):
        self.kernels, self.pool, self.cache, self.device = kernels, pool, cache, device
        self.block_size = cache.max_len  # rows that lie together

    def plan(self, batch: Batch) -> None:
        d = self.num_decode = batch.num_decode
        self.out_loc = self.locate(np.repeat(batch.rows, batch.lens), batch.positions)  # [T]
        if d:
            self.seqlens = upload(batch.ends[:d].astype(np.int32), self.device)
            self.blocks = self.find_blocks(batch)
        if d < len(batch.reqs):
            lens, ends = batch.lens[d:], batch.ends[d:]
            self.cu_q, self.max_q = cu_seqlens(lens, self.device), int(lens.max())
            self.cu_k, self.max_k = cu_seqlens(ends, self.device), int(ends.max())
            self.context = None  # pool rows of all keys of the chunks, request by request
            if batch.starts[d:].any():  # else a chunk brings all its keys along
                position = np.arange(ends.sum()) - np.repeat(ends.cumsum() - ends, ends)
                self.context = self.locate(np.repeat(batch.rows[d:], ends), upload(position, self.device))

    def locate(self, rows: np.ndarray, positions: Tensor) -> Tensor:
        """Pool rows [N] of the positions [N] of the requests in the cache manager's rows [N]."""
        return upload(rows * self.block_size, self.device) + positions

    def find_blocks(self, batch: Batch) -> dict[str, Tensor]:
        """Where the decode kernel finds each request."""
        return {"cache_batch_idx": upload(batch.rows[: batch.num_decode].astype(np.int32), self.device)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        self.pool.store(layer, self.out_loc, k, v)
        d, parts = self.num_decode, []
        if d:
            parts.append(self.decode(layer, q[:d], self.seqlens, **self.blocks))
        if d < len(q):
            keys = (k[d:], v[d:])
            if self.context is not None:
                keys = self.pool.k[layer][self.context], self.pool.v[layer][self.context]
            prefill = self.kernels.flash_attn_varlen_func
            parts.append(prefill(q[d:], *keys, self.cu_q, self.cu_k, self.max_q, self.max_k, causal=True))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def decode(self, layer: int, q: Tensor, seqlens: Tensor, **blocks: Tensor) -> Tensor:
        """One query a request, q [B, Hq, D], against what the pool holds of it."""
        k, v = (t[layer].view(-1, self.block_size, *t[layer].shape[1:]) for t in (self.pool.k, self.pool.v))
        return self.kernels.flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=seqlens, causal=True, **blocks)[
            :, 0
        ]
