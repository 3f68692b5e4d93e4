"""Attention of a mixed step: decodes in one call, chunks of prompts in another, whatever the number of requests."""

import numpy as np
import torch
from torch import Tensor

from common.config import UserError
from common.device import upload
from common.kernels import Kernels
from stage2_req.attention import cu_seqlens
from stage2_req.req import Batch
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.cache import SlotCacheManager


class SlotAttention:
    """The first `num_decode` tokens of a step are decodes, one a request; the others are chunks, laid end to end."""

    def __init__(
        self,
        kernels: Kernels,
        pool: KVCachePool,
        cache: SlotCacheManager,
        device: torch.device,
        block_size: int | None = None,
    ):
        """block_size: rows of the pool that lie together, a slot or a page. Raises UserError if kernels can't read such."""
        self.kernels, self.pool, self.cache, self.device = kernels, pool, cache, device
        self.block_size = block_size or cache.max_len
        if self.block_size % kernels.block_multiple:
            raise UserError(
                f"--attn {kernels.name} reads keys in blocks of {kernels.block_multiple} tokens, not {self.block_size}; "
                "make the page size (without pages: --max-model-len) a multiple of that, or use another --attn"
            )

    def plan(self, batch: Batch) -> None:
        d = self.num_decode = batch.num_decode
        rows = upload(np.repeat(batch.rows, batch.lens), self.device)
        self.out_loc = self.locate(rows, batch.positions)  # [T]
        if d:
            self.seqlens = upload(batch.ends[:d].astype(np.int32), self.device)
            self.blocks = self.find_blocks(batch)
        if d < len(batch.reqs):
            lens, ends = batch.lens[d:], batch.ends[d:]
            self.cu_q, self.max_q = cu_seqlens(lens, self.device), int(lens.max())
            self.cu_k, self.max_k = cu_seqlens(ends, self.device), int(ends.max())
            # blocks of the chunks' requests [B, blocks], or None: then the chunks bring all their keys along
            self.context = self.find_context(batch) if batch.starts[d:].any() else None

    def locate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Pool rows [N] of the positions [N] of the requests in the cache manager's rows [N]."""
        return rows * self.block_size + positions

    def find_blocks(self, batch: Batch) -> dict[str, Tensor]:
        """Where the decode kernel finds each request."""
        return {"cache_batch_idx": upload(batch.rows[: batch.num_decode].astype(np.int32), self.device)}

    def find_context(self, batch: Batch) -> Tensor:
        """Where the prefill kernel finds each request with a chunk: a slot is one long block."""
        return upload(batch.rows[batch.num_decode :, None].astype(np.int32), self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        self.pool.store(layer, self.out_loc, k, v)
        d, parts = self.num_decode, []
        if d:
            parts.append(self.decode(layer, q[:d], self.seqlens, **self.blocks))
        if d < len(q):
            keys = (k[d:], v[d:]) if self.context is None else self.blocks_of(layer)
            bounds = (self.cu_q, self.cu_k, self.max_q, self.max_k)
            prefill = self.kernels.flash_attn_varlen_func
            parts.append(prefill(q[d:], *keys, *bounds, causal=True, block_table=self.context))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def decode(self, layer: int, q: Tensor, seqlens: Tensor, **more: Tensor) -> Tensor:
        """One query a request, q [B, Hq, D], against what the pool holds of it; `more` goes to the kernel as it is."""
        decode = self.kernels.flash_attn_with_kvcache
        return decode(q[:, None], *self.blocks_of(layer), cache_seqlens=seqlens, causal=True, **more)[:, 0]

    def blocks_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pool's K and V, [num_blocks, block_size, num_kv_heads, head_dim]."""
        k, v = self.pool.k[layer], self.pool.v[layer]
        return k.view(-1, self.block_size, *k.shape[1:]), v.view(-1, self.block_size, *v.shape[1:])
