"""Which requests compute in the next step, and which are done. Owns the two queues; knows nothing of tensors."""

import time
from collections import deque

from common.config import UserError
from stage2_req.parts import CacheManager, SchedulerStats
from stage2_req.prompt_logprobs import book
from stage2_req.req import Batch, Logprobs, Output, Req


class FCFSScheduler:
    """First come, first served: one request runs to its end, then the next."""

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self.reqs: dict[int, Req] = {}  # by uid; all that have not ended
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []  # oldest first

    def add(self, req: Req) -> None:
        """Raises UserError if another request has the same uid."""
        if req.uid in self.reqs:
            raise UserError(f"uid {req.uid} belongs to a request that has not ended; choose another")
        self.reqs[req.uid] = req
        self.waiting.append(req)

    def abort(self, uid: int) -> bool:
        """End a request, whatever its state; False if it is not here (any more)."""
        if uid not in self.reqs:
            return False
        self.finish(self.reqs[uid], "abort")
        return True

    def has_work(self) -> bool:
        return bool(self.reqs)

    def schedule(self) -> Batch | None:
        if not self.running and self.waiting and self.cache.admit(self.waiting[0]):
            self.running.append(req := self.waiting.popleft())
            req.admitted_at = time.perf_counter()
        picks = [(req, req.extend_len) for req in self.running if req.extend_len]
        return Batch.build(picks, self.cache.allocate(picks))

    def update(
        self,
        batch: Batch,
        tokens: list[int],
        logprobs: list[Logprobs] | None = None,
        prompt_logprobs: list[Logprobs] | None = None,
    ) -> list[Output]:
        """Append what the step sampled for its S requests and end those that are done.

        prompt_logprobs, if there are any, are booked first; a request's first output brings all that it asked for.
        """
        now, outputs = time.perf_counter(), []
        if prompt_logprobs is not None:
            book(batch, prompt_logprobs)
        for i, (req, token) in enumerate(zip(batch.sampled, tokens, strict=True)):
            if req.finish_reason:  # it ended while this step was under way
                continue
            is_first, entry = not req.first_token_at, None
            req.first_token_at = req.first_token_at or now
            req.token_ids.append(token)
            if logprobs is not None and (wanted := req.params.logprobs) is not None:
                entry = Logprobs(logprobs[i].chosen, logprobs[i].top[:wanted])
                req.logprobs.append(entry)
            if reason := req.reason_to_stop(token):
                self.finish(req, reason)
            prompt = req.prompt_logprobs if is_first and req.params.prompt_logprobs is not None else None
            outputs.append(Output(req, token, reason, entry, prompt))
        return outputs

    def finish(self, req: Req, reason: str) -> None:
        req.finish_reason, req.finished_at = reason, time.perf_counter()
        del self.reqs[req.uid]
        if req in self.running:
            self.running.remove(req)
            self.cache.release(req)
        else:
            self.waiting.remove(req)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.running), len(self.waiting))
