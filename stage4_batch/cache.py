"""Fixed regions: every running request owns max_len slots of the pool, whether it needs them or not."""

from collections.abc import Sequence

import numpy as np
import torch

from stage2_req.parts import CacheStats
from stage2_req.req import Batch, Req
from stage4_batch.page_table import PageTable


class FixedCacheManager:
    """A region is a page of max_len tokens, so the page table has one column, which never changes: request i has page i."""

    def __init__(self, max_running: int, max_len: int, device: torch.device):
        self.max_running, self.max_len = max_running, max_len
        self.page_table = PageTable(max_running, 1, page_size=max_len, device=device)
        every_idx = np.arange(max_running)
        self.page_table.write(every_idx, np.zeros_like(every_idx), every_idx.astype(np.int32))
        self.table_idx: dict[int, int] = {}  # by uid
        self.free = list(range(max_running))[::-1]

    def admit(self, req: Req) -> bool:
        if not self.free:
            return False
        self.table_idx[req.uid], req.cached_len = self.free.pop(), 0
        return True

    def allocate(self, picks: Sequence[tuple[Req, int]]) -> np.ndarray:
        """A region has room for anything that the engine accepts."""
        return np.array([self.table_idx[req.uid] for req, _ in picks], np.int64)

    def commit(self, batch: Batch) -> None:
        for req, seq_len in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            req.cached_len = seq_len

    def release(self, req: Req) -> None:
        self.free.append(self.table_idx.pop(req.uid))

    def stats(self) -> CacheStats:
        return CacheStats(usage=len(self.table_idx) / self.max_running, free_requests=len(self.free))

    def check_integrity(self) -> None:
        every_idx = sorted([*self.free, *self.table_idx.values()])
        assert every_idx == list(range(self.max_running)), "a region is lost or owned twice"
