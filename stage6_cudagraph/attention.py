"""Attention from buffers that never move: what a CUDA graph may record."""

import torch
from torch import Tensor

from stage5_paged.attention import PagedAttention


class StaticDecode:
    """Decodes at any recorded size, padding included.

    The positions and the table rows of the requests say it all: the rest (how long, which pages, where to store) is
    looked up on the device, as a part of the recorded step. A padding row is a request of its own, the first token of a
    text in the pool's last page, which no allocator hands out: it reads nothing of others and harms nobody.
    """

    def __init__(self, paged: PagedAttention):
        self.paged, self.padding_page = paged, last_page(paged)

    def plan(self, positions: Tensor, rows: Tensor) -> None:
        """positions and rows [size] int32; a padding row has position 0 and row -1."""
        table = self.paged.cache.page_table[rows]  # [size, max_pages]
        self.block_table = table.masked_fill_((rows < 0)[:, None], self.padding_page)
        self.cached = positions  # tokens before the new one

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [size, Hq, D], k and v [size, Hkv, D] -> [size, Hq, D]"""
        return self.paged.decode(layer, q, self.cached, block_table=self.block_table, k=k[:, None], v=v[:, None])


class StaticMixed:
    """Decodes and chunks of prompts in one step of any recorded size, padding included.

    Every token belongs to a sequence of the prefill kernel: the first holds the decodes, then come the chunks, then
    empty ones for chunks that aren't there, and the last holds the padding. The first and the last have no keys, so they
    get zeros; and a decode that isn't there gets zeros from the decode kernel. The sum is what everybody should have.
    """

    def __init__(self, paged: PagedAttention):
        self.paged = paged
        self.padding_row = last_page(paged) * paged.block_size

    def plan(
        self,
        positions: Tensor,
        rows: Tensor,
        lens: Tensor,
        chunk_rows: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
    ) -> None:
        """All int32. positions and rows [T] of every token, row -1: padding. lens [D] of the first tokens' requests, the
        new token included, 0: no decode. chunk_rows [C], cu_q and cu_k [C + 1], of the sequences."""
        table = self.paged.cache.page_table
        located = self.paged.locate(rows, positions)
        self.out_loc = torch.where(rows < 0, self.padding_row, located)  # [T]
        self.decode_table, self.lens = table[rows[: len(lens)]], lens
        self.context, self.bounds = table[chunk_rows], (cu_q, cu_k)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        paged, decodes = self.paged, len(self.lens)
        paged.pool.store(layer, self.out_loc, k, v)
        longest = (len(q), paged.cache.max_len)
        prefill = paged.kernels.flash_attn_varlen_func
        out = prefill(q, *paged.blocks_of(layer), *self.bounds, *longest, causal=True, block_table=self.context)
        out[:decodes] += paged.decode(layer, q[:decodes], self.lens, block_table=self.decode_table)
        return out


def last_page(paged: PagedAttention) -> int:
    """The page beyond the allocator's range, for what padding writes."""
    return paged.pool.num_tokens // paged.block_size - 1
