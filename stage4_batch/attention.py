"""Attention of a mixed step: decodes in one call, chunks of prompts in another, whatever the number of requests."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config import UserError
from common.kernels import Kernels
from stage2_req.attention import cu_seqlens
from stage2_req.req import Batch, upload
from stage3_kvcache.kv_pool import KVCachePool
from stage4_batch.page_table import PageTable


@dataclass(frozen=True, eq=False)
class Decodes:
    """Requests with one new token, the first D tokens of a step."""

    cache_seqlens: Tensor  # [D] int32 tokens in the pool when the kernel starts
    page_table: Tensor  # [D, pages] int32


@dataclass(frozen=True, eq=False)
class Chunks:
    """Requests with several new tokens, laid end to end."""

    cu_seqlens_q: Tensor  # [C + 1] int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: Tensor | None  # [C, pages] int32; None: the step brings all their keys and values along


@dataclass(frozen=True, eq=False)
class PagedMetadata:
    out_loc: Tensor | None  # [T] int64 slots of the new tokens; None: only decodes, whose kernel stores them itself
    decodes: Decodes | None
    chunks: Chunks | None


class PagedAttention:
    """Over a pool of pages, of whatever size: also over fixed regions, which are pages of max_len tokens."""

    def __init__(self, kernels: Kernels, pool: KVCachePool, page_table: PageTable):
        """Raises UserError if the kernels can't read pages of this size."""
        self.kernels, self.pool, self.page_table = kernels, pool, page_table
        self.device, size = page_table.device.device, page_table.page_size
        if size % kernels.block_multiple:
            raise UserError(
                f"--attn {kernels.name} reads keys in blocks of {kernels.block_multiple} tokens, not {size}; "
                "make the page size (without pages: --max-model-len) a multiple of that, or use another --attn"
            )

    def plan(self, batch: Batch) -> PagedMetadata:
        d = batch.num_decodes
        if d == len(batch.reqs):
            return PagedMetadata(None, Decodes(self.int32(batch.prefix_lens), self.pages_of(batch, slice(d))), None)
        out_loc = self.page_table.slots(np.repeat(batch.table_idx, batch.extend_lens), batch.positions())
        decodes = Decodes(self.int32(batch.seq_lens[:d]), self.pages_of(batch, slice(d))) if d else None
        extend_lens, seq_lens = batch.extend_lens[d:], batch.seq_lens[d:]
        chunks = Chunks(
            cu_seqlens_q=cu_seqlens(extend_lens, self.device),
            cu_seqlens_k=cu_seqlens(seq_lens, self.device),
            max_seqlen_q=int(extend_lens.max()),
            max_seqlen_k=int(seq_lens.max()),
            page_table=self.pages_of(batch, slice(d, None)) if batch.prefix_lens[d:].any() else None,
        )
        return PagedMetadata(upload(out_loc, self.device), decodes, chunks)

    def pages_of(self, batch: Batch, part: slice) -> Tensor:
        """The table of a part of the batch [B, pages], only as wide as the longest request needs."""
        width = -(-int(batch.seq_lens[part].max()) // self.page_table.page_size)
        return self.page_table.device[upload(batch.table_idx[part], self.device), :width]

    def int32(self, numbers: np.ndarray) -> Tensor:
        return upload(numbers.astype(np.int32), self.device)

    def __call__(self, metadata: PagedMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        decodes, chunks = metadata.decodes, metadata.chunks
        if chunks is None:
            return self.decode(decodes, layer, q, k[:, None], v[:, None])
        self.kernels.ops.store_kv(self.pool.k[layer], self.pool.v[layer], metadata.out_loc, k, v)
        if decodes is None:
            return self.prefill(chunks, layer, q, k, v)
        d = len(decodes.cache_seqlens)
        return torch.cat((self.decode(decodes, layer, q[:d]), self.prefill(chunks, layer, q[d:], k[d:], v[d:])))

    def decode(
        self, decodes: Decodes, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """One query per request, q [D, Hq, D]; k and v [D, 1, Hkv, D] of tokens that are not in the pool yet."""
        lens, table = decodes.cache_seqlens, decodes.page_table
        decode = self.kernels.flash_attn_with_kvcache
        return decode(q[:, None], *self.pages(layer), k, v, cache_seqlens=lens, block_table=table, causal=True)[:, 0]

    def prefill(self, chunks: Chunks, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Many queries per request."""
        keys = (k, v) if chunks.page_table is None else self.pages(layer)
        bounds = chunks.cu_seqlens_q, chunks.cu_seqlens_k, chunks.max_seqlen_q, chunks.max_seqlen_k
        return self.kernels.flash_attn_varlen_func(q, *keys, *bounds, causal=True, block_table=chunks.page_table)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pool's K and V, [num_pages, page_size, num_kv_heads, head_dim]."""
        k, v = self.pool.k[layer], self.pool.v[layer]
        shape = (-1, self.page_table.page_size, *k.shape[1:])
        return k.view(shape), v.view(shape)
