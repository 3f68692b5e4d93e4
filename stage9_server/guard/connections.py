"""How slow a client may be. Whoever has the next word on a connection has limits; beyond them it is closed.

A client has the next word while its request is not complete (or not begun), and while it does not read what is written
to it. The time that the engine takes is not the client's.
"""

import asyncio
import resource
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from stage9_server.guard.guard import Guard, NoGuard

MAX_HEAD = 64 << 10  # bytes of a request before its body
MAX_FILES = 1 << 16
BEGINNING = b"HTTP/1.1 "  # of every answer
LOOK_SECONDS = 0.1  # between two looks whether a client is still there


class Connection(AutoHTTPProtocol):
    """uvicorn's, with two additions: a limit for what comes before a request is understood, which one of its two parsers
    lacks; and a client that has sent its request may close its side of the connection and still gets the answer.

    Whether such a client waits or has left shows only when something is written: if it has left, the connection is in
    error then. So the first bytes of the answer, which are always the same, are written at once.
    """

    head_bytes = 0

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        in_head = self.cycle is before and (before is None or (before.response_complete and not before.more_body))
        self.head_bytes = self.head_bytes + len(data) if in_head else 0
        if self.head_bytes > MAX_HEAD:
            self.transport.abort()

    def eof_received(self) -> bool:
        """Keep the connection open? `cycle` is the newest request. It may wait in line, if the client has sent several without
        waiting for the answers.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        if not cycle.response_started and not getattr(self, "pipeline", None):
            self.transport.write(BEGINNING)
            cycle.transport = Begun(self.transport)
        self.look()
        return True

    def look(self) -> None:
        """Until the connection is closed: close it if the client has left."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(LOOK_SECONDS, self.look)


class Begun:
    """A connection on which the beginning of the answer has been written already."""

    def __init__(self, transport: asyncio.Transport):
        self.transport, self.is_closing, self.close = transport, transport.is_closing, transport.close

    def write(self, data: bytes) -> None:
        self.transport.write(data.removeprefix(BEGINNING))
        self.write = self.transport.write


class Server(uvicorn.Server):
    """One that leaves the signals to us, and waits for no client for ever."""

    def __init__(self, config: uvicorn.Config, guard: "Guard | NoGuard"):
        super().__init__(config)
        self.guard = guard

    async def on_tick(self, counter: int) -> bool:  # ten times a second
        if counter % 10 == 0:
            self.guard.look(self.server_state.connections)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Patience:
    """Closes connections whose client takes too long, and the most idle ones where there are too many."""

    def __init__(self, seconds: float, most: int):
        self.seconds, self.most = seconds, most
        self.since: dict[tuple, float] = {}  # (connection, its request, bytes unread) -> since when that is so

    def look(self, connections: Iterable[Connection]) -> None:
        """To be called about once a second."""
        now, every = time.monotonic(), list(connections)
        keys = [(c, c.cycle, c.transport.get_write_buffer_size()) for c in every if clients_turn(c)]
        self.since = {key: self.since.get(key, now) for key in keys}
        too_many = len(every) - self.most
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
