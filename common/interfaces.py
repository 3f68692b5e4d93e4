"""The parts of the engine as protocols. Each stage replaces one or two parts; this is all that the rest relies on.

`req` and `batch` are stage 2's Req and Batch. Shapes: T new tokens in a step, B requests, S of them sampled, V words.
"""

from typing import Any, Protocol

from torch import Tensor


class Attention(Protocol):
    def plan(self, batch: Any) -> None:
        """Once a step, before the first layer: derive what every layer needs from the batch."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> [T, Hq, D]."""


class CacheManager(Protocol):
    """Maps (request, position) to rows of memory. Sole writer of `req.cached_len`."""

    max_len: int  # rows that one request can have at the most

    def admit(self, req: Any) -> bool:
        """Let a waiting request in; False if there is no room now. Sets req.cached_len."""

    def extend(self, batch: Any) -> None:
        """Room for every position up to batch.ends, and batch.rows. All or nothing; asking twice takes nothing more."""

    def commit(self, batch: Any) -> None:
        """The step has been enqueued: its positions are cached now."""

    def release(self, req: Any) -> None:
        """Take back all that the request holds."""

    def usage(self) -> float:
        """Share of the memory in use, 0 to 1."""

    def check_integrity(self) -> None:
        """AssertionError unless every row has exactly one owner."""


class Runner(Protocol):
    def run(self, batch: Any) -> Tensor:
        """One pass of the model: logits [S, V] of the positions to be sampled."""


class Sampler(Protocol):
    def __call__(self, logits: Tensor, reqs: list[Any]) -> Any:
        """logits [S, V] of S requests -> stage 2's Samples, on the device."""


class Scheduler(Protocol):
    """Owns the waiting and the running queue."""

    def add(self, req: Any) -> None: ...

    def abort(self, uid: int) -> bool:
        """End a request, whatever its state; False if it is not here."""

    def has_work(self) -> bool: ...

    def schedule(self) -> Any | None:
        """The next step as a Batch, or None if there is nothing to compute."""

    def update(self, batch: Any, tokens: list[int], logprobs: list[Any] | None) -> list[Any]:
        """Append what a step sampled; returns an Output for every token."""

    def finish(self, req: Any, reason: str) -> None: ...
