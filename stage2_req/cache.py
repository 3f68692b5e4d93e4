"""The cache manager that manages no cache: the null form of the part which stages 3, 4, 5 and 7 build."""

from collections.abc import Sequence

import numpy as np

from stage2_req.parts import CacheStats
from stage2_req.req import Batch, Req


class NullCacheManager:
    """Keeps nothing. `cached_len` stays 0, so every step computes the whole sequence."""

    def __init__(self, max_len: int):
        self.max_len = max_len

    def admit(self, req: Req) -> bool:
        return True

    def allocate(self, picks: Sequence[tuple[Req, int]]) -> np.ndarray:
        """There is no table: every request has index 0."""
        return np.zeros(len(picks), np.int64)

    def commit(self, batch: Batch) -> None:
        pass

    def release(self, req: Req) -> None:
        pass

    def stats(self) -> CacheStats:
        return CacheStats()

    def check_integrity(self) -> None:
        pass
