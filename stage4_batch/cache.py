"""Fixed slots: every running request owns max_len rows of the pool, whether it needs them or not."""

import numpy as np

from stage2_req.req import Batch, Req


class SlotCacheManager:
    """Position p of the request in slot s lies in row s * max_len + p."""

    def __init__(self, num_slots: int, max_len: int):
        self.num_slots, self.max_len = num_slots, max_len
        self.slots: dict[int, int] = {}  # uid -> slot
        self.free = list(range(num_slots))[::-1]

    def admit(self, req: Req) -> bool:
        if not self.free:
            return False
        self.slots[req.uid], req.cached_len = self.free.pop(), 0
        return True

    def extend(self, batch: Batch) -> None:
        """Only batch.rows: a slot has room for anything that the engine accepts."""
        batch.rows = np.array([self.slots[req.uid] for req in batch.reqs])

    def commit(self, batch: Batch) -> None:
        for req, end in zip(batch.reqs, batch.ends.tolist(), strict=True):
            req.cached_len = end

    def release(self, req: Req) -> None:
        self.free.append(self.slots.pop(req.uid))

    def usage(self) -> float:
        return len(self.slots) / self.num_slots

    def check_integrity(self) -> None:
        assert sorted([*self.free, *self.slots.values()]) == list(range(self.num_slots)), (
            "a slot is lost or owned twice"
        )
