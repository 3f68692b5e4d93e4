"""The API server's side of the processes: which call waits for what.

Owns the API server's inbox and the list of all sequences in flight. Lives in one asyncio loop. What happens when a worker
dies: guard/restarts.py.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from stage9_server import messages
from stage9_server.ipc import API, DETOKENIZER, SCHEDULER, pull_socket, push_socket, receive, send
from stage9_server.messages import Accepted, Detokenize, EngineStats, Failed, Message, Piece, Tokenize


class RequestFailed(Exception):
    """A call gets no (further) answer. `status` is the HTTP status, `message` a sentence for the client."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class OpenSequence:
    """One uid that a call waits for."""

    answers: asyncio.Queue
    generates: bool  # or only asks a tokenizer something
    tokenizer: str | None  # to which it was given, until something comes back


class Hub:
    def __init__(self, folder: str, tokenizers: int):
        self.context = zmq.Context()
        self.tokenizers = [f"tokenizer-{i}" for i in range(tokenizers)]
        self.inbox = pull_socket(self.context, folder, API)
        self.names = (SCHEDULER, DETOKENIZER, *self.tokenizers)
        self.outboxes = {name: push_socket(self.context, folder, name) for name in self.names}
        self.up: set[str] = set()  # workers that have reported Ready
        self.sequences: dict[int, OpenSequence] = {}
        self.last_uid = 0
        self.info: dict = {}
        self.stats: EngineStats | None = None
        self.draining = False
        self.look_on: Callable[[messages.Inspected], None] | None = None  # with --inspect: who gets the engine's steps

    # --- for the API server ---

    def new_uids(self, n: int) -> list[int]:
        self.last_uid += n
        return list(range(self.last_uid - n + 1, self.last_uid + 1))

    def health(self) -> str | None:
        """None if requests are being answered, else a sentence with the reason."""
        return "the server is shutting down" if self.draining else None

    async def stream(self, calls: list[Tokenize]) -> AsyncIterator[list[Piece]]:
        """The pieces of all sequences of the calls as they come, until each has its end: each time all that is waiting, one
        piece for a sequence. So to a client that is late, several tokens come as one. The first list comes as soon as the
        engine has taken all of the calls, and not before, even if there is no piece yet.

        Raises RequestFailed as soon as one of them fails. Leaving early (use contextlib.aclosing) aborts the rest.
        """
        open_uids = {uid for call in calls for uid in call.uids}
        queue: asyncio.Queue[Accepted | Piece | Failed] = asyncio.Queue()
        unknown, pieces = set(open_uids), []  # those of which we don't know that the engine has them
        try:
            for call in calls:
                await self.submit(call, queue, generates=True)
            while open_uids:
                answers = [await queue.get()]
                while not queue.empty():
                    answers.append(queue.get_nowait())
                for answer in answers:
                    if isinstance(answer, Failed):
                        open_uids.difference_update(answer.uids)
                        raise RequestFailed(answer.status, answer.message)
                    unknown.difference_update([answer.uid] if isinstance(answer, Piece) else answer.uids)
                pieces += [answer for answer in answers if isinstance(answer, Piece)]
                if not unknown:
                    open_uids.difference_update(piece.uid for piece in pieces if piece.finish_reason)
                    yield messages.merged(pieces)
                    pieces = []
        finally:
            self.abort(open_uids)

    def abort(self, uids: Iterable[int]) -> None:
        """These are not waited for any more. Every process that may have or get them is notified."""
        gone = {uid: sequence for uid in uids if (sequence := self.sequences.pop(uid, None))}
        for name in (SCHEDULER, *self.tokenizers):
            held = [uid for uid, s in gone.items() if (s.generates if name == SCHEDULER else s.tokenizer == name)]
            if held:
                self.send(name, messages.Abort(held))

    # --- calls on their way ---

    async def submit(self, message: Tokenize | Detokenize, answers: asyncio.Queue, generates: bool) -> None:
        """Give a call to the tokenizer with the least to do."""
        await self.available()
        load = Counter(sequence.tokenizer for sequence in self.sequences.values())
        name = min(self.up.intersection(self.tokenizers), key=load.__getitem__)
        for uid in message.uids:
            self.sequences[uid] = OpenSequence(answers, generates, name)
        self.send(name, message)

    async def available(self) -> None:
        """Wait until a call can be submitted; RequestFailed if that makes no sense."""
        if reason := self.health():
            raise RequestFailed(503, f"{reason}; try again later")

    def send(self, to: str, message: Message) -> None:
        send(self.outboxes[to], message)

    async def run(self) -> None:
        """Hand out what arrives, for ever. First all of it, and then the calls go on: each once, however much there is."""
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self.inbox.FD, readable.set)
        try:
            while True:
                readable.clear()
                for message in receive(self.inbox):
                    self.handle(message)
                await readable.wait()
        finally:
            loop.remove_reader(self.inbox.FD)

    def handle(self, message: Message) -> None:
        """A message about a uid that no call waits for is dropped."""
        match message:
            case messages.Pieces():
                for piece in message.pieces:
                    self.answer(piece.uid, piece, piece.finish_reason is not None)
            case messages.Tokenized() | messages.Detokenized():
                self.answer(message.uid, message, True)
            case Accepted() | Failed():
                for uid in message.uids:
                    self.answer(uid, message, isinstance(message, Failed))
            case EngineStats():
                self.stats = message
            case messages.Inspected() if self.look_on:
                self.look_on(message)
            case messages.Ready():
                self.up.add(message.worker)
                self.info |= message.info

    def answer(self, uid: int, answer: Message | Piece, last: bool) -> None:
        if sequence := self.sequences.get(uid):
            sequence.answers.put_nowait(answer)
            sequence.tokenizer = None
            if last:
                del self.sequences[uid]

    # --- the end ---

    async def drain(self, seconds: float) -> None:
        """Accept no further calls; let open answers go on for so long."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.sequences:
                    await asyncio.sleep(0.02)

    def close(self) -> None:
        for outbox in self.outboxes.values():
            outbox.close(linger=0)
        self.inbox.close()
        self.context.term()
