"""An order of the waiting queue: the request that shares the most with what is in memory goes first."""

from collections.abc import Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from stage2_req.req import Req
from stage7_radix.cache import RadixCacheManager

WINDOW, PATIENCE = 16, 8  # requests at the head of the queue that are compared; times that one may be overtaken


class LongestPrefixFirst:
    """The waiting request with the longest known prefix goes first; after it, the others in their order of arrival.

    With more prefixes than memory this serves the requests that share one while it is there, instead of evicting it for
    the next. Alone it would starve: a request that shares with no other waits as long as others arrive that do. So none
    is overtaken more than PATIENCE times.
    """

    def __init__(self, cache: RadixCacheManager):
        self.cache = cache
        self.overtaken: WeakKeyDictionary[Req, int] = WeakKeyDictionary()

    def __call__(self, waiting: Sequence[Req]) -> int:
        """The place in the queue of the request that goes first."""
        if not self.cache.stats().free_requests:  # none is let in, so none is overtaken
            return 0
        candidates = []
        for req in islice(waiting, WINDOW):
            candidates.append(req)
            if self.overtaken.get(req, 0) >= PATIENCE:
                break
        if len(candidates) == 1:
            return 0
        best = max(range(len(candidates)), key=lambda i: self.cache.known_len(candidates[i]))  # of equals, the first
        for req in candidates[:best]:
            self.overtaken[req] = self.overtaken.get(req, 0) + 1
        return best
