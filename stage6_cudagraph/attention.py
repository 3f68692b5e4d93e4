"""Attention of a decode step from buffers that never move: what a CUDA graph may record."""

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from stage2_req.req import Batch
from stage5_paged.attention import PagedAttention


class StaticDecode:
    """Decodes of up to `max_batch` requests, padded to any smaller size.

    Static are the positions and the table rows of the requests; all else (where to store, how long, which pages) is
    computed on the device from these and from the page table, as a part of the recorded step. A padding row has
    position -1: its length is 0, so it reads nothing, and it writes to the pool's last row, which no page contains.
    """

    def __init__(self, paged: PagedAttention, max_batch: int):
        self.paged, self.device = paged, paged.device
        self.buffer = torch.zeros(2, max_batch, dtype=torch.int64, device=self.device)
        self.positions, self.rows = self.buffer
        self.positions.fill_(-1)

    def fill(self, batch: Batch, size: int) -> None:
        """The batch's requests into the buffers, padding behind them up to `size`; one upload."""
        host = np.zeros((2, size), np.int64)
        host[0] = -1
        host[:, : len(batch.reqs)] = batch.starts, batch.rows
        self.buffer[:, :size] = upload(host, self.device)

    def plan(self, size: int) -> None:
        """What every layer needs, by operations on the device alone."""
        positions, table, page = self.positions[:size], self.paged.cache.page_table, self.paged.block_size
        self.block_table = table[self.rows[:size]]  # [size, max_pages]
        self.seqlens = (positions + 1).int()
        pages = self.block_table.gather(1, (positions.clamp(min=0) // page)[:, None])[:, 0].long()
        padding = self.paged.pool.num_tokens - 1
        self.out_loc = torch.where(positions >= 0, pages * page + positions % page, padding)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [size, Hq, D], k and v [size, Hkv, D] -> [size, Hq, D]"""
        pool = self.paged.pool
        pool.store(layer, self.out_loc, k, v)
        return self.paged.decode(layer, q, self.seqlens, block_table=self.block_table)
