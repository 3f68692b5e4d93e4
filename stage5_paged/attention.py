"""Attention over pages: as with slots, but a look into the page table stands between a position and its row."""

from torch import Tensor

from common.device import upload
from stage2_req.req import Batch
from stage4_batch.attention import SlotAttention


class PagedAttention(SlotAttention):
    def __init__(self, kernels, pool, cache, device):
        super().__init__(kernels, pool, cache, device, cache.page_size)

    def locate(self, rows: Tensor, positions: Tensor) -> Tensor:
        pages = self.cache.page_table[rows, positions // self.block_size]
        return pages.long() * self.block_size + positions % self.block_size

    def find_blocks(self, batch: Batch) -> dict[str, Tensor]:
        return {"block_table": self.look_up(batch, slice(batch.num_decode))}

    def find_context(self, batch: Batch) -> Tensor:
        return self.look_up(batch, slice(batch.num_decode, None))

    def look_up(self, batch: Batch, part: slice) -> Tensor:
        """The table's rows of a part of the batch [B, pages], only as wide as the longest needs."""
        width = self.cache.pages_for(int(batch.ends[part].max()))
        return self.cache.page_table[upload(batch.rows[part], self.device), :width]
