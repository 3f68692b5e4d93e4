"""Continuous batching over pages: when they run out, somebody gives way."""

from common.interfaces import CacheManager
from stage2_req.req import Batch
from stage2_req.scheduler import FCFSScheduler
from stage4_batch.scheduler import schedule_step
from stage5_paged.page_allocator import OutOfPages


class PagedScheduler(FCFSScheduler):
    def __init__(self, cache: CacheManager, budget: int):
        super().__init__(cache)
        self.budget, self.num_retracted = budget, 0

    def schedule(self) -> Batch | None:
        while True:
            try:
                return schedule_step(self.waiting, self.running, self.cache, self.budget)
            except OutOfPages:
                self.retract()

    def retract(self) -> None:
        """The youngest gives way (vLLM: preempt, by recomputation).

        It keeps its tokens and waits at the head of the queue, to compute its rows again. The oldest never gives way
        to anyone, and fits alone, since the engine refuses what does not: so every request comes to its end.
        """
        req = self.running.pop()
        self.cache.release(req)
        self.waiting.appendleft(req)
        self.num_retracted += 1
