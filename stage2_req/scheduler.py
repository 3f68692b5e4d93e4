"""Who computes in the next step, and who is done. Owns the two queues; knows nothing of tensors."""

import time
from collections import deque

from common.interfaces import CacheManager
from stage2_req.req import Batch, Output, Req
from stage2_req.sampling import Logprobs


class FCFSScheduler:
    """First come, first served: one request runs to its end, then the next."""

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []  # oldest first

    def add(self, req: Req) -> None:
        self.waiting.append(req)

    def abort(self, uid: int) -> bool:
        """End a request, whatever its state; False if it is not here (any more)."""
        for req in (*self.running, *self.waiting):
            if req.uid == uid:
                self.finish(req, "abort")
                return True
        return False

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Batch | None:
        if not self.running and self.waiting and self.cache.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        picks = [(req, req.extend_len) for req in self.running if req.extend_len]
        if not picks:
            return None
        batch = Batch(picks)
        self.cache.extend(batch)
        return batch

    def update(self, batch: Batch, tokens: list[int], logprobs: list[Logprobs] | None = None) -> list[Output]:
        """Append what the step sampled for its S requests and end those that are done."""
        now, outputs = time.perf_counter(), []
        for i, (req, token) in enumerate(zip(batch.sampled, tokens, strict=True)):
            if req.finish_reason:  # it ended while this step was under way
                continue
            req.first_token_at = req.first_token_at or now
            req.token_ids.append(token)
            entry = None
            if logprobs is not None and (wanted := req.params.logprobs) is not None:
                entry = Logprobs(logprobs[i].chosen, logprobs[i].top[:wanted])
                req.logprobs.append(entry)
            if reason := req.reason_to_stop(token):
                self.finish(req, reason)
            outputs.append(Output(req, token, reason, entry))
        return outputs

    def finish(self, req: Req, reason: str) -> None:
        req.finish_reason, req.finished_at = reason, time.perf_counter()
        if req in self.running:
            self.running.remove(req)
            self.cache.release(req)
        else:
            self.waiting.remove(req)
