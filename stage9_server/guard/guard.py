"""The guard of an API server, and its null form. Owns what all requests together may take, and the deaths of workers."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from fastapi import FastAPI

from stage9_server.guard.connections import Connection, Patience, allow_files
from stage9_server.guard.gate import Gate
from stage9_server.ipc import DETOKENIZER, SCHEDULER
from stage9_server.openai_api.errors import ApiError

LOGPROBS = "log-probabilities (sequences x tokens x (likeliest ones + 1))"
RESTARTS = {SCHEDULER: 3, DETOKENIZER: 10, "tokenizer": 10}  # deaths in RESTART_WINDOW after which we give up
RESTART_WINDOW = 600.0  # seconds


@dataclass
class Limits:
    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # names that clients may know the server by; empty: any (see DNS rebinding)
    max_concurrent: int = 1024  # sequences in flight
    max_logprobs: int = 1 << 20  # log-probabilities in answers under way, some 300 bytes each
    max_body_bytes: int = 4 << 20
    client_seconds: float = 60.0


class NoGuard:
    """The null form."""

    on = False
    protocol = "auto"  # uvicorn's, for a connection

    def install(self, app: FastAPI) -> None:
        """Put what looks at requests in front of the app's routes."""

    def room(self, sequences: int, logprobs: int = 0):
        """Around a call: room for so many sequences in flight, and log-probabilities in its answer; or ApiError."""
        return nullcontext()

    def look(self, connections: Iterable) -> None:
        """To be called about once a second."""

    def gives_up(self, kind: str) -> str | None:
        """A worker of this kind has died. None if it may be started again, else why not."""
        return f"the {kind} died"


class Guard:
    on = True
    protocol = Connection

    def __init__(self, limits: Limits):
        self.limits, self.patience = limits, Patience(limits.client_seconds, allow_files())
        self.sequences = self.logprobs = 0  # under way
        self.deaths: dict[str, deque[float]] = defaultdict(deque)

    def install(self, app: FastAPI) -> None:
        app.add_middleware(Gate, limits=self.limits)

    @contextmanager
    def room(self, sequences: int, logprobs: int = 0) -> Iterator[None]:
        limits = self.limits
        check_room("sequences", sequences, limits.max_concurrent, self.sequences, limits.max_concurrent)
        check_room(LOGPROBS, logprobs, limits.max_logprobs // 4, self.logprobs, limits.max_logprobs)
        self.sequences, self.logprobs = self.sequences + sequences, self.logprobs + logprobs
        try:
            yield
        finally:
            self.sequences, self.logprobs = self.sequences - sequences, self.logprobs - logprobs

    def look(self, connections: Iterable[Connection]) -> None:
        self.patience.look(connections)

    def gives_up(self, kind: str) -> str | None:
        now, deaths = time.monotonic(), self.deaths[kind]
        deaths.append(now)
        while now - deaths[0] > RESTART_WINDOW:
            deaths.popleft()
        if len(deaths) <= RESTARTS[kind]:
            return None
        return f"the {kind} died {len(deaths)} times in {RESTART_WINDOW / 60:g} minutes"


def check_room(what: str, size: int, most: int, under_way: int, limit: int) -> None:
    """ApiError if one call is too large, or for now one too many."""
    if size > most:
        raise ApiError(400, f"the call has {size} {what}; at most {most} fit in here")
    if under_way + size > limit:
        message = f"{under_way} of {limit} {what} are under way, and the call has {size}; try again later"
        raise ApiError(429, message, code="rate_limit_exceeded")
