"""The guard of a server, and its null form. Owns what all requests together may take."""

import ipaddress
import socket
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from fastapi import FastAPI

from stage9_server.guard.connections import Connection, Patience, allow_files
from stage9_server.guard.gate import Gate
from stage9_server.guard.restarts import RestartingHub, Supervisor
from stage9_server.hub import Hub
from stage9_server.openai_api.errors import ApiError
from stage9_server.workers import Workers

LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOGPROBS = "log-probabilities (sequences x tokens x (likeliest ones + 1))"


@dataclass
class Limits:
    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # names that clients may know the server by; empty: any (see DNS rebinding)
    max_concurrent: int = 1024  # sequences in flight
    max_logprobs: int = 1 << 20  # log-probabilities in answers under way, some 300 bytes each
    max_body_bytes: int = 4 << 20
    client_seconds: float = 60.0


def make_guard(args: Namespace, sock: socket.socket) -> "Guard | NoGuard":
    """As the flags want it, for a server that listens at this socket."""
    if not args.guard:
        return NoGuard()
    counts = args.max_concurrent, args.max_logprobs, args.max_body_bytes, args.client_seconds
    return Guard(Limits(args.api_key, host_names(args.host, sock.getsockname()[0]), *counts))


def host_names(host: str, address: str) -> tuple[str, ...]:
    """By which names clients may know a server that listens at this address: any, if others than this machine reach it."""
    return tuple(dict.fromkeys((host.lower(), *LOOPBACK))) if ipaddress.ip_address(address).is_loopback else ()


class NoGuard:
    """The null form."""

    hub, workers = Hub, Workers
    protocol = "auto"  # uvicorn's, for a connection

    def install(self, app: FastAPI) -> None:
        """Put what looks at requests in front of the app's routes."""

    def room(self, sequences: int, logprobs: int = 0):
        """Around a call: room for so many sequences in flight, and log-probabilities in its answer; or ApiError."""
        return nullcontext()

    def look(self, connections: Iterable) -> None:
        """To be called about once a second."""


class Guard:
    hub, workers = RestartingHub, Supervisor
    protocol = Connection

    def __init__(self, limits: Limits):
        self.limits, self.patience = limits, Patience(limits.client_seconds, allow_files())
        self.sequences = self.logprobs = 0  # under way

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


def check_room(what: str, size: int, most: int, under_way: int, limit: int) -> None:
    """ApiError if one call is too large, or for now one too many."""
    if size > most:
        raise ApiError(400, f"the call has {size} {what}; at most {most} fit in here")
    if under_way + size > limit:
        message = f"{under_way} of {limit} {what} are under way, and the call has {size}; try again later"
        raise ApiError(429, message, code="rate_limit_exceeded")
