"""How slow a client may be. Whoever has the next word on a connection has limits; beyond them it is closed.

A client has the next word while its request is not complete (or not begun), and while it does not read what is written
to it. The time that the engine takes is not the client's.
"""

import resource
import time
from collections.abc import Iterable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEAD = 64 << 10  # bytes of a request before its body
MAX_FILES = 1 << 16


class Connection(AutoHTTPProtocol):
    """uvicorn's, with a limit for what comes before a request is understood; one of its two parsers has none."""

    head_bytes = 0

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        in_head = self.cycle is before and (before is None or (before.response_complete and not before.more_body))
        self.head_bytes = self.head_bytes + len(data) if in_head else 0
        if self.head_bytes > MAX_HEAD:
            self.transport.abort()


class Patience:
    """Closes connections whose client lets us wait too long, and the most idle ones where there are too many."""

    def __init__(self, seconds: float, most: int):
        self.seconds, self.most = seconds, most
        self.since: dict[tuple, float] = {}  # (connection, its request, bytes unread) -> since when that is so

    def look(self, connections: Iterable[Connection]) -> None:
        """To be called about once a second."""
        now, everyone = time.monotonic(), list(connections)
        keys = [(c, c.cycle, c.transport.get_write_buffer_size()) for c in everyone if clients_turn(c)]
        self.since = {key: self.since.get(key, now) for key in keys}
        too_many = len(everyone) - self.most
        for i, key in enumerate(sorted(self.since, key=self.since.get)):
            if i < too_many or now - self.since[key] > self.seconds:
                key[0].transport.abort()  # which is to the rest as if the client had left


def clients_turn(connection: Connection) -> bool:
    cycle = connection.cycle
    return cycle is None or cycle.response_complete or cycle.more_body or connection.flow.write_paused


def allow_files() -> int:
    """As many open files as the system lets us have; how many of them may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most * 3 // 4
