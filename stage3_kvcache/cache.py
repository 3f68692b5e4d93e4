"""A cache for one request: position p lies in row p."""

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

    def extend(self, batch: Batch) -> None:
        """Nothing to do: the whole pool is there from the start."""

    def commit(self, batch: Batch) -> None:
        for req, end in zip(batch.reqs, batch.ends.tolist(), strict=True):
            req.cached_len = end

    def release(self, req: Req) -> None:
        assert self.owner is req
        self.owner = None

    def usage(self) -> float:
        return self.owner.cached_len / self.max_len if self.owner else 0.0

    def check_integrity(self) -> None:
        assert self.owner is None or self.owner.cached_len <= self.max_len
