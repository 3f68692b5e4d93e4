"""Continuous batching: requests join and leave between steps, prompts come in chunks.

The policy is two functions, so that the next stage can use them too.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from stage2_req.parts import CacheManager
from stage2_req.req import Batch, Req
from stage2_req.scheduler import FCFSScheduler

Pick = tuple[Req, int]  # a request, and how many of its positions to compute
# Of the waiting queue: the place of the request that goes first in this step. The rest keep their order of arrival.
Order = Callable[[Sequence[Req]], int]


def first_come(waiting: Sequence[Req]) -> int:
    """First come, first served."""
    return 0


def pick_running(running: Sequence[Req], budget: int) -> list[Pick]:
    """What the running requests compute in a step of `budget` tokens.

    1. Requests that need one position get it, even if they alone are more than the budget: a long prompt never holds up
       running requests. The longest come first: a GPU that starts with the longest pieces of work is done soonest.
    2. Prompts under way get what is left, the oldest first.
    """
    needs = [(req, req.extend_len) for req in running]
    picks = [pick for pick in needs if pick[1] == 1]
    picks.sort(key=lambda pick: -pick[0].cached_len)
    budget -= len(picks)
    for req, n in needs:
        if n > 1 and budget > 0:
            picks.append((req, n := min(n, budget)))
            budget -= n
    return picks


def admit_waiting(
    waiting: deque[Req], running: list[Req], cache: CacheManager, budget: int, order: Order = first_come
) -> tuple[list[Pick], np.ndarray]:
    """Let requests in while budget and room last; returns what they compute, and their table_idx.

    `order` says which request goes first. After that no request overtakes the head of the queue, so a stream of short prompts
    can't starve a long one. A request is let in only when all before it got all they needed, so at most one prompt is
    half done at any time.
    """
    picks, table_idx = [], []
    if budget > 0 and waiting and (first := order(waiting)):
        req = waiting[first]
        del waiting[first]
        waiting.appendleft(req)
    while budget > 0 and waiting and cache.admit(waiting[0]):
        req = waiting.popleft()
        req.admitted_at = req.admitted_at or time.perf_counter()
        running.append(req)
        picks.append((req, n := min(req.extend_len, budget)))
        budget -= n
        table_idx += cache.allocate(picks[-1:]).tolist()
    return picks, np.array(table_idx, np.int64)


class BatchScheduler(FCFSScheduler):
    """Many requests at once, within a budget of tokens per step (vLLM: max_num_batched_tokens)."""

    def __init__(self, cache: CacheManager, budget: int):
        super().__init__(cache)
        self.budget = budget

    def schedule(self) -> Batch | None:
        picks = pick_running(self.running, self.budget)
        table_idx = self.cache.allocate(picks)
        left = self.budget - sum(n for _, n in picks)
        newcomers, their_idx = admit_waiting(self.waiting, self.running, self.cache, left)
        return Batch.build(picks + newcomers, np.append(table_idx, their_idx))
