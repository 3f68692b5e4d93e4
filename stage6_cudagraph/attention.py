"""Attention of a decode step from buffers that never move: what a CUDA graph may record."""

from torch import Tensor

from stage5_paged.attention import PagedAttention


class StaticDecode:
    """Decodes at any recorded size, padding included.

    The positions and the table rows of the requests say it all: the rest (how long, which pages, where to store) is
    looked up on the device, as a part of the recorded step. A padding row is a request of its own, the first token of a
    text in the pool's last page, which no allocator hands out: it reads nothing of others and harms nobody.
    """

    def __init__(self, paged: PagedAttention):
        self.paged = paged
        self.padding_page = paged.pool.num_tokens // paged.block_size - 1

    def plan(self, positions: Tensor, rows: Tensor) -> None:
        """positions and rows [size] int32; a padding row has position 0 and row -1."""
        table = self.paged.cache.page_table[rows]  # [size, max_pages]
        self.block_table = table.masked_fill_((rows < 0)[:, None], self.padding_page)
        self.cached = positions  # tokens before the new one

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [size, Hq, D], k and v [size, Hkv, D] -> [size, Hq, D]"""
        return self.paged.decode(layer, q, self.cached, block_table=self.block_table, k=k[:, None], v=v[:, None])
