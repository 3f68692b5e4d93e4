"""Continuous batching: requests join and leave between steps, prompts come in chunks.

The policy is a function, so that the next stage can use it too.
"""

from collections import deque

from common.interfaces import CacheManager
from stage2_req.req import Batch, Req
from stage2_req.scheduler import FCFSScheduler


def schedule_step(waiting: deque[Req], running: list[Req], cache: CacheManager, budget: int) -> Batch | None:
    """Fill one step of up to `budget` tokens (more only if more requests than that are decoding).

    1. Whoever needs one position gets it: a long prompt never holds up running requests.
    2. Prompts under way get what is left, the oldest first.
    3. Whoever waits is let in, first come first served, while budget and room last. Nobody overtakes the head of the
       queue, so a stream of short prompts can't starve a long one; and since a newcomer comes in only when all before
       it got all they needed, at most one prompt is half done at any time.

    Raises what cache.extend raises, before anything has changed.
    """
    needs = [(req, req.extend_len) for req in running]
    picks = [(req, n) for req, n in needs if n == 1]
    budget -= len(picks)
    for req, n in needs:
        if n > 1 and budget > 0:
            picks.append((req, n := min(n, budget)))
            budget -= n
    batch = None
    if picks:
        cache.extend(batch := Batch(picks))  # before anyone is let in: a failure leaves nothing to undo
    newcomers = []
    while budget > 0 and waiting and cache.admit(waiting[0]):
        req = waiting.popleft()
        running.append(req)
        newcomers.append((req, n := min(req.extend_len, budget)))
        budget -= n
        cache.extend(Batch(newcomers[-1:]))  # can't fail: admit has looked
    if newcomers:
        cache.extend(batch := Batch(picks + newcomers))  # takes nothing more: it only fills batch.rows
    return batch


class BatchScheduler(FCFSScheduler):
    """Many requests at once, within `budget` tokens a step (vLLM: max_num_batched_tokens)."""

    def __init__(self, cache: CacheManager, budget: int):
        super().__init__(cache)
        self.budget = budget

    def schedule(self) -> Batch | None:
        return schedule_step(self.waiting, self.running, self.cache, self.budget)
