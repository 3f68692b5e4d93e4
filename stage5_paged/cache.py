"""Pages instead of fixed regions: a request holds what it needs now, and gets another page when the last one is full."""

from collections.abc import Sequence

import numpy as np
import torch

from stage2_req.parts import CacheStats
from stage2_req.req import Batch, Req
from stage4_batch.page_table import PageTable
from stage5_paged.page_allocator import PageAllocator

RESERVE = 16  # tokens of head-room that admission leaves to each running request


class PagedCacheManager:
    """Owns the page table, and knows which of its rows belongs to which request."""

    def __init__(self, num_pages: int, page_size: int, max_running: int, max_len: int, device: torch.device):
        self.page_size, self.max_len = page_size, min(max_len, num_pages * page_size)
        self.allocator = PageAllocator(num_pages)
        self.page_table = PageTable(max_running, self.pages_for(self.max_len), page_size, device)
        self.reserve = RESERVE
        self.table_idx: dict[int, int] = {}  # by uid
        self.free_table_idx = list(range(max_running))[::-1]
        self.held = np.zeros(max_running, dtype=np.int64)  # pages of each row of the table

    def pages_for(self, num_tokens):
        """Pages that hold so many tokens (a number or an array)."""
        return -(-num_tokens // self.page_size)

    def available(self) -> int:
        """Pages that can be had."""
        return self.allocator.num_free

    def take(self, n: int) -> np.ndarray:
        """n pages, int32. Raises OutOfPages."""
        return self.allocator.alloc(n)

    def has_room(self, pages: int) -> bool:
        """For one more request that needs so many pages, and some head-room for all that run already?"""
        head_room = len(self.table_idx) * self.pages_for(self.reserve)
        return bool(self.free_table_idx) and pages + head_room <= self.available()

    def admit(self, req: Req) -> bool:
        """Is there room for all known tokens? What the request may generate later is not reserved.

        If pages run out then, a request is retracted.
        """
        if not self.has_room(self.pages_for(req.device_len)):
            return False
        self.table_idx[req.uid], req.cached_len = self.free_table_idx.pop(), 0
        return True

    def allocate(self, picks: Sequence[tuple[Req, int]]) -> np.ndarray:
        """Pages for so many more positions of each request, or OutOfPages and nothing taken. Returns table_idx [B]."""
        table_idx = np.array([self.table_idx[req.uid] for req, _ in picks], np.int64)
        seq_lens = np.array([req.cached_len + n for req, n in picks], np.int64)
        need = self.pages_for(seq_lens) - self.held[table_idx]
        short = (need > 0).nonzero()[0]
        if len(short):
            idx, need = table_idx[short], need[short]
            pages = self.take(int(need.sum()))
            # held 3 and 7, need 2 and 1: pages 0, 1, 2 go to columns 3, 4 of the one and 7 of the other, that is to their
            # own number plus 3, 3, 5
            first = self.held[idx] - (need.cumsum() - need)
            self.held[idx] += need
            self.page_table.write(np.repeat(idx, need), np.arange(len(pages)) + np.repeat(first, need), pages)
        return table_idx

    def commit(self, batch: Batch) -> None:
        for req, seq_len in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            req.cached_len = seq_len

    def drop_row(self, req: Req) -> np.ndarray:
        """Take its row of the table away from a request; returns the pages that were in it."""
        row = self.table_idx.pop(req.uid)
        self.free_table_idx.append(row)
        pages, self.held[row] = self.page_table.host[row, : self.held[row]].copy(), 0
        return pages

    def release(self, req: Req) -> None:
        self.allocator.free(self.drop_row(req))

    def stats(self) -> CacheStats:
        free, total = self.available(), self.allocator.num_pages
        return CacheStats(
            usage=1 - free / total, free_requests=len(self.free_table_idx), free_pages=free, num_pages=total
        )

    def owned_pages(self) -> list[np.ndarray]:
        """The pages of each owner."""
        return [self.page_table.host[row, : self.held[row]] for row in self.table_idx.values()]

    def check_integrity(self) -> None:
        pages = np.concatenate([self.allocator.free_pages(), *self.owned_pages()])
        owners = np.bincount(pages, minlength=self.allocator.num_pages)
        assert len(owners) == self.allocator.num_pages and (owners == 1).all(), "a page is lost or owned twice"
        rows = sorted([*self.free_table_idx, *self.table_idx.values()])
        assert rows == list(range(len(self.held))), "a row of the table is lost or owned twice"
        for row in self.table_idx.values():
            used = slice(self.held[row])
            host, device = self.page_table.host[row, used], self.page_table.device[row, used].cpu().numpy()
            assert np.array_equal(host, device), "the mirror differs"
