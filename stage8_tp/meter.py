"""A look at what ranks send to each other: wrap any of them before the engine is built."""

import time
from collections import Counter

from torch import Tensor

from common.device import synchronize
from stage8_tp.ranks import Alone, Ranks


class MeteredRanks:
    """Counts collectives, the bytes that a rank brings to them, and the time until they are done, waiting included.

    On a GPU it waits for the device before and after each, which is good for the split of the time, not for the time.
    """

    def __init__(self, ranks: Ranks | Alone):
        self.ranks, self.broadcast_bytes, self.all_gather_ints = ranks, ranks.broadcast_bytes, ranks.all_gather_ints
        self.rank, self.world, self.device, self.staged = ranks.rank, ranks.world, ranks.device, ranks.staged
        self.clear()

    def clear(self) -> None:
        self.calls, self.bytes, self.seconds = Counter(), Counter(), 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.metered("all_reduce", x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.metered("all_gather", x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self.metered("broadcast", x)

    def metered(self, name: str, x: Tensor) -> Tensor:
        self.calls[name] += 1
        self.bytes[name] += x.nbytes
        synchronize(self.device)
        start = time.perf_counter()
        result = getattr(self.ranks, name)(x)
        synchronize(self.device)
        self.seconds += time.perf_counter() - start
        return result
