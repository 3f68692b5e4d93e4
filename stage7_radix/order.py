"""An order of the waiting queue: whoever shares the most with what is in memory goes first."""

from itertools import islice
from weakref import WeakKeyDictionary

from common.interfaces import Scheduler
from stage2_req.req import Batch, Req
from stage7_radix.cache import RadixCacheManager

WINDOW, PATIENCE = 16, 8  # requests at the head of the queue that are compared; times that one may be overtaken


class PrefixFirst:
    """A scheduler around a scheduler. Before each step, the waiting request with the longest known prefix comes first.

    With more prefixes than memory this serves those who share one while it is there, instead of evicting it for the
    next. Alone it would starve: who shares with nobody waits as long as others arrive who do. So nobody is overtaken
    more than PATIENCE times.
    """

    def __init__(self, scheduler: Scheduler, cache: RadixCacheManager):
        self.scheduler, self.cache = scheduler, cache
        self.overtaken: WeakKeyDictionary[Req, int] = WeakKeyDictionary()

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)  # all else stays as it is

    def schedule(self) -> Batch | None:
        if self.cache.free_rows:  # else nobody gets in
            self.reorder()
        return self.scheduler.schedule()

    def reorder(self) -> None:
        waiting, candidates = self.scheduler.waiting, []
        for req in islice(waiting, WINDOW):
            candidates.append(req)
            if self.overtaken.get(req, 0) >= PATIENCE:
                break
        if len(candidates) > 1:
            best = max(candidates, key=self.cache.known_len)  # of equals, the one that has waited longest
            for req in candidates[: candidates.index(best)]:
                self.overtaken[req] = self.overtaken.get(req, 0) + 1
            waiting.remove(best)
            waiting.appendleft(best)
