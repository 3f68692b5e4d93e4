"""The parts of the engine as protocols. Each stage replaces one or two parts; this is all that the others rely on.

Shapes: T new tokens in a step, B requests, S of them sampled, V entries in the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from stage2_req.req import Batch, Logprobs, Metadata, Output, Req, Samples


@dataclass(frozen=True)
class CacheStats:
    """What a cache manager holds. A manager leaves out what it does not have."""

    usage: float = 0.0  # share of the memory in use, 0 to 1
    free_requests: int = 0  # how many more could run at the same time, if there is memory for them
    free_pages: int = 0
    num_pages: int = 0
    hit_tokens: int = 0  # of all prompts so far: positions that were cached already
    prompt_tokens: int = 0  # and all positions


@dataclass(frozen=True)
class SchedulerStats:
    """Numbers of requests."""

    running: int = 0
    waiting: int = 0
    retracted: int = 0  # how often a running request had to give its memory back, so far


@dataclass(frozen=True)
class Stats(CacheStats, SchedulerStats):
    """A summary of all parts."""

    steps: int = 0
    computed_tokens: int = 0  # positions that went through the model
    output_tokens: int = 0


class Scheduler(Protocol):
    """Owns the waiting and the running queue; others may look at them."""

    waiting: Sequence[Req]
    running: Sequence[Req]  # oldest first

    def add(self, req: Req) -> None: ...

    def abort(self, uid: int) -> bool:
        """End a request, whatever its state; False if it is not here."""

    def has_work(self) -> bool: ...

    def schedule(self) -> Batch | None:
        """The next step, its memory allocated; or None if there is nothing to compute."""

    def update(
        self,
        batch: Batch,
        tokens: list[int],
        logprobs: list[Logprobs] | None,
        prompt_logprobs: list[Logprobs] | None,
    ) -> list[Output]:
        """Append what a step sampled for its S requests; returns an Output for every token. prompt_logprobs: [P]."""

    def stats(self) -> SchedulerStats: ...


class CacheManager(Protocol):
    """Maps (request, position) to slots of memory. Sole writer of `req.cached_len`."""

    max_len: int  # positions that one request can have at the most

    def admit(self, req: Req) -> bool:
        """Let a waiting request in; False if there is no room now."""

    def allocate(self, picks: Sequence[tuple[Req, int]]) -> np.ndarray:
        """Slots for so many more positions of each request. Returns its index in this manager's table, [B] int64.

        All or nothing: if memory runs out, nothing is taken and the manager raises its own exception. That can't happen
        to a request that was admitted in the same step: `admit` has looked whether all its tokens fit.
        """

    def commit(self, batch: Batch) -> None:
        """The step has been enqueued: its positions are cached now."""

    def release(self, req: Req) -> None:
        """Take back all that the request holds."""

    def stats(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """AssertionError unless every slot has exactly one owner."""


class Attention(Protocol[Metadata]):
    def plan(self, batch: Batch) -> Metadata:
        """Once a step, before the first layer: what every layer needs to know of the batch."""

    def __call__(self, metadata: Metadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> [T, Hq, D]."""


class Sampler(Protocol):
    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> Samples:
        """logits [S, V] of S requests -> one token for each."""

    def draw(self, logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
        """The same for requests that ask for no more than a temperature: tokens [S]."""


class Runner(Protocol):
    def forward(self, batch: Batch) -> Samples:
        """One pass of the model and of the sampler, enqueued on the device."""
