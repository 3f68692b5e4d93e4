"""The cache manager that manages no cache: the null form of the part which stages 3, 4, 5 and 7 build."""

from stage2_req.req import Batch, Req


class NullCacheManager:
    """Keeps nothing. `cached_len` stays 0, so every step computes the whole sequence."""

    def __init__(self, max_len: int):
        self.max_len = max_len

    def admit(self, req: Req) -> bool:
        return True

    def extend(self, batch: Batch) -> None:
        pass

    def commit(self, batch: Batch) -> None:
        pass

    def release(self, req: Req) -> None:
        pass

    def usage(self) -> float:
        return 0.0

    def check_integrity(self) -> None:
        pass
