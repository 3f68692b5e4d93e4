"""Pages instead of slots: a request holds what it needs now, and gets another page when it has filled the last."""

import numpy as np
import torch

from common.device import upload
from stage2_req.req import Batch, Req
from stage5_paged.page_allocator import PageAllocator

RESERVE = 16  # tokens of head-room that admission leaves to each running request


class PagedCacheManager:
    """Owns the page table (vLLM: block tables): a host copy to account with, its mirror on the device to compute with.

    Position p of the request in row r lies in pool row page_table[r, p // page_size] * page_size + p % page_size.
    """

    def __init__(self, num_pages: int, page_size: int, max_running: int, max_len: int, device: torch.device):
        self.page_size, self.max_len, self.device = page_size, min(max_len, num_pages * page_size), device
        self.reserve = RESERVE
        self.allocator = PageAllocator(num_pages)
        self.table = np.zeros((max_running, self.pages_for(self.max_len)), dtype=np.int32)
        self.page_table = torch.zeros(self.table.shape, dtype=torch.int32, device=device)
        self.held = np.zeros(max_running, dtype=np.int64)  # pages in each row of the table
        self.rows: dict[int, int] = {}  # uid -> row of the table
        self.free_rows = list(range(max_running))[::-1]

    def pages_for(self, num_tokens):
        """Pages that hold so many tokens (a number or an array)."""
        return -(-num_tokens // self.page_size)

    def available(self) -> int:
        """Pages that can be had."""
        return self.allocator.num_free

    def allocate(self, n: int) -> np.ndarray:
        return self.allocator.alloc(n)

    def has_room(self, pages: int) -> bool:
        """For one more request that needs so many pages, and some head-room for everyone who already runs?"""
        head_room = len(self.rows) * self.pages_for(self.reserve)
        return bool(self.free_rows) and pages + head_room <= self.available()

    def admit(self, req: Req) -> bool:
        """Is there room for all known tokens? What the request may generate later is not reserved.

        If pages run out then, somebody is retracted.
        """
        if not self.has_room(self.pages_for(req.device_len)):
            return False
        self.rows[req.uid], req.cached_len = self.free_rows.pop(), 0
        return True

    def extend(self, batch: Batch) -> None:
        """Pages up to batch.ends for everyone, or OutOfPages and nothing taken; asking twice takes nothing more."""
        rows = batch.rows = np.array([self.rows[req.uid] for req in batch.reqs])
        need = self.pages_for(batch.ends) - self.held[rows]
        short = (need > 0).nonzero()[0]
        if not len(short):
            return
        rows, need = rows[short], need[short]
        pages = self.allocate(int(need.sum()))
        first = self.held[rows] + need - need.cumsum()  # of its new columns, less those of the requests before it
        self.held[rows] += need
        self.write(np.repeat(rows, need), np.arange(len(pages)) + np.repeat(first, need), pages)

    def write(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Set entries of the table and of its mirror; one upload, whatever their number."""
        self.table[rows, columns] = pages
        entries = rows * self.table.shape[1] + columns  # int64; as a pair of int32 it travels together with the pages
        both = upload(np.concatenate((entries.view(np.int32), pages)), self.device)
        self.page_table.view(-1).index_copy_(0, both[: -len(pages)].view(torch.int64), both[-len(pages) :])

    def commit(self, batch: Batch) -> None:
        for req, end in zip(batch.reqs, batch.ends.tolist(), strict=True):
            req.cached_len = end

    def drop_row(self, req: Req) -> np.ndarray:
        """Take the row away from a request; returns the pages that were in it."""
        row = self.rows.pop(req.uid)
        self.free_rows.append(row)
        pages, self.held[row] = self.table[row, : self.held[row]].copy(), 0
        return pages

    def release(self, req: Req) -> None:
        self.allocator.free(self.drop_row(req))

    def usage(self) -> float:
        return 1 - self.available() / self.allocator.num_pages

    def private_pages(self) -> list[np.ndarray]:
        return [self.table[row, : self.held[row]] for row in self.rows.values()]

    def check_integrity(self) -> None:
        pages = np.concatenate([self.allocator.free_pages(), *self.private_pages()])
        owners = np.bincount(pages, minlength=self.allocator.num_pages)
        assert len(owners) == self.allocator.num_pages and (owners == 1).all(), "a page is lost or owned twice"
        assert sorted([*self.free_rows, *self.rows.values()]) == list(range(len(self.table))), (
            "a row is lost or owned twice"
        )
        for row in self.rows.values():
            used = slice(self.held[row])
            assert np.array_equal(self.table[row, used], self.page_table[row, used].cpu()), "the mirror differs"
