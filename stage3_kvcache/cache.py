"""A cache for one request: position p lies in slot p."""

from collections.abc import Sequence

import numpy as np

from stage2_req.parts import CacheStats
from stage2_req.req import Batch, Req


class SingleCacheManager:
    def __init__(self, max_len: int):
        self.max_len = max_len
        self.owner: Req | None = None

    def admit(self, req: Req) -> bool:
        if self.owner is not None:
            return False
        self.owner, req.cached_len = req, 0
        return True

    def allocate(self, picks: Sequence[tuple[Req, int]]) -> np.ndarray:
        """Nothing to do: the whole pool is there from the start."""
        return np.zeros(len(picks), np.int64)

    def commit(self, batch: Batch) -> None:
        for req, seq_len in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            req.cached_len = seq_len

    def release(self, req: Req) -> None:
        assert self.owner is req
        self.owner = None

    def stats(self) -> CacheStats:
        return CacheStats(usage=self.owner.cached_len / self.max_len if self.owner else 0.0)

    def check_integrity(self) -> None:
        assert self.owner is None or self.owner.cached_len <= self.max_len
