"""Attention of a decode step from buffers that never move: what a CUDA graph may record."""

import numpy as np
import torch
from torch import Tensor

from common.device import pin
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
        self.memory = torch.full((2 * max_batch,), -1, dtype=torch.int64, device=self.device)

    def buffers(self, size: int) -> Tensor:
        """Positions and table rows of `size` requests, [2, size]: the head of the memory, so that one copy fills it."""
        return self.memory[: 2 * size].view(2, size)

    def fill(self, batch: Batch, size: int) -> None:
        """The batch's requests into the buffers, padding behind them up to `size`."""
        host = np.full((2, size), -1)
        host[1] = 0
        host[:, : len(batch.reqs)] = batch.starts, batch.rows
        self.buffers(size).copy_(pin(host, self.device), non_blocking=True)

    def plan(self, size: int) -> None:
        """What every layer needs, by operations on the device alone."""
        self.positions, rows = self.buffers(size)
        page, padding = self.paged.block_size, self.paged.pool.num_tokens - 1
        self.block_table = self.paged.cache.page_table[rows]  # [size, max_pages]
        self.seqlens = (self.positions + 1).int()
        pages = self.block_table.gather(1, (self.positions.clamp(min=0) // page)[:, None])[:, 0].long()
        self.out_loc = torch.where(self.positions >= 0, pages * page + self.positions % page, padding)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [size, Hq, D], k and v [size, Hkv, D] -> [size, Hq, D]"""
        pool = self.paged.pool
        pool.store(layer, self.out_loc, k, v)
        return self.paged.decode(layer, q, self.seqlens, block_table=self.block_table)
