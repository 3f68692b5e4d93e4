"""How the processes talk. Every one has one inbox, a ZMQ PULL socket on a file of its name in the server's private folder,
and a PUSH socket to each inbox that it writes to.

Sending never waits: queues have no limit, since what is in them is bounded by the requests that the API server lets in. A
process that is started again takes the file over, and the sockets that write to it reconnect by themselves; what was on its
way to the dead one may be lost or arrive, and both is harmless, because everything is about a uid, no uid is used twice, and
messages about an unknown one are dropped.
"""

import os
import signal
import sys

import msgspec
import zmq

from common.config import EngineConfig
from stage9_server.guard.pauses import freeze_garbage
from stage9_server.messages import Message, Ready, decode, encode

API, SCHEDULER, DETOKENIZER = "api", "scheduler", "detokenizer"
ORPHANED = 128 + signal.SIGHUP  # status of a worker that ends because the API server has died
Envelope = tuple[str, Message]  # (receiver, message)


class Settings(msgspec.Struct):
    """All settings of a worker, as JSON in its command line."""

    name: str  # its own
    incarnation: int  # how many of its kind there were before
    folder: str  # where the inboxes are; only the user can enter
    parent: int  # process id of the API server
    engine: EngineConfig
    max_queue: int  # sequences that may wait for the engine
    guard: bool = True  # see guard/


def push_socket(context: zmq.Context, folder: str, name: str) -> zmq.Socket:
    """For writing to a process's inbox, whether that exists already or not."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)  # ms that the last messages have to leave when it is closed
    socket.connect(f"ipc://{folder}/{name}")
    return socket


def pull_socket(context: zmq.Context, folder: str, name: str) -> zmq.Socket:
    """A process's inbox."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{folder}/{name}")
    return socket


def send(socket: zmq.Socket, message: Message) -> None:
    socket.send(encode(message), zmq.NOBLOCK)


def receive(socket: zmq.Socket) -> list[Message]:
    """All that is there."""
    messages = []
    while True:
        try:
            messages.append(decode(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


class Worker:
    """A worker's side: its inbox, and the inboxes that it writes to."""

    def __init__(self, settings: Settings):
        self.settings, self.context, self.parent = settings, zmq.Context(), os.getppid()
        self.inbox = pull_socket(self.context, settings.folder, settings.name)
        names = (API, SCHEDULER, DETOKENIZER)
        self.outboxes = {name: push_socket(self.context, settings.folder, name) for name in names}

    def send(self, to: str, message: Message) -> None:
        send(self.outboxes[to], message)

    def receive(self, wait: bool, seconds: float = 1) -> list[Message]:
        """All that is in the inbox. With `wait`: at least something, or nothing for so long."""
        if wait and not self.inbox.poll(seconds * 1000) and os.getppid() != self.parent:
            sys.exit(ORPHANED)  # for systems that have no signal for this
        return receive(self.inbox)

    def ready(self, **info) -> None:
        """Tell the API server; for the rest of the process's life nothing big is loaded."""
        freeze_garbage()
        self.send(API, Ready(self.settings.name, self.settings.incarnation, info))
