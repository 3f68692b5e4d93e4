"""Continuous batching over pages: when they run out, a request gives its pages back."""

from dataclasses import replace

import numpy as np

from stage2_req.parts import CacheManager, SchedulerStats
from stage2_req.req import Batch
from stage2_req.scheduler import FCFSScheduler
from stage4_batch.scheduler import Order, admit_waiting, first_come, pick_running
from stage5_paged.page_allocator import OutOfPages


class PagedScheduler(FCFSScheduler):
    """Stage 4's policy, with retraction. `order`: of the waiting queue."""

    def __init__(self, cache: CacheManager, budget: int, order: Order = first_come):
        super().__init__(cache)
        self.budget, self.order, self.num_retracted = budget, order, 0
        self.memory_is_short = False  # in this step

    def schedule(self) -> Batch | None:
        while True:
            picks = pick_running(self.running, self.budget)
            try:
                table_idx = self.cache.allocate(picks)
                break
            except OutOfPages:
                self.retract()
        if self.memory_is_short:
            # no request is let in, least of all one that was retracted just now
            self.memory_is_short = False
            return Batch.build(picks, table_idx)
        left = self.budget - sum(n for _, n in picks)
        newcomers, their_idx = admit_waiting(self.waiting, self.running, self.cache, left, self.order)
        return Batch.build(picks + newcomers, np.append(table_idx, their_idx))

    def retract(self) -> None:
        """The youngest request goes back to the queue (vLLM: preempted, to be recomputed).

        It keeps its tokens and waits at the head of the queue, to compute its keys and values again. The oldest is never
        retracted for another one, and fits alone, since the engine refuses what does not: so every request comes to its
        end.
        """
        req = self.running.pop()
        self.cache.release(req)
        self.waiting.appendleft(req)
        self.num_retracted += 1
        self.memory_is_short = True

    def stats(self) -> SchedulerStats:
        return replace(super().stats(), retracted=self.num_retracted)
