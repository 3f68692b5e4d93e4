"""The API server's side of the processes: which workers are up, which call waits for what, and what happens to it when a worker dies.

Owns the API server's inbox and the list of all sequences in flight. Lives in one asyncio loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import zmq

from stage9_server.ipc import API, DETOKENIZER, SCHEDULER, pull_socket, push_socket, receive, send
from stage9_server.messages import (
    Abort,
    Detokenize,
    Detokenized,
    EngineStats,
    Failed,
    Message,
    Piece,
    Pieces,
    Ready,
    Tokenize,
    Tokenized,
    merged,
)

SILENCE = 120.0  # seconds without a word after which the scheduler no longer counts as healthy: longer than any step
PATIENCE = 60.0  # seconds that a call waits for a tokenizer or the detokenizer to come back


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


@dataclass
class Peer:
    """A worker. The socket outlives its process: what is still in there finds the next one."""

    socket: zmq.Socket
    incarnation: int = 0
    up: bool = False  # its present incarnation has reported Ready


class Hub:
    def __init__(self, folder: str, tokenizers: int):
        self.context = zmq.Context()
        self.tokenizers = [f"tokenizer-{i}" for i in range(tokenizers)]
        self.inbox = pull_socket(self.context, folder, API)
        names = (SCHEDULER, DETOKENIZER, *self.tokenizers)
        self.workers = {name: Peer(push_socket(self.context, folder, name)) for name in names}
        self.sequences: dict[int, OpenSequence] = {}
        self.last_uid = 0
        self.info: dict = {}
        self.stats: EngineStats | None = None
        self.heard_at = 0.0  # when the scheduler last sent anything; it has to, once per second
        self.last_words: dict[str, Failed] = {}  # of workers that ended: uids empty, status the exit status
        self.draining = False

    # --- for the API server ---

    def new_uids(self, n: int) -> list[int]:
        self.last_uid += n
        return list(range(self.last_uid - n + 1, self.last_uid + 1))

    def health(self) -> str | None:
        """None if requests are being answered, else a sentence with the reason."""
        if self.draining:
            return "the server is shutting down"
        down = [name for name in (SCHEDULER, DETOKENIZER) if not self.workers[name].up]
        if not any(self.workers[name].up for name in self.tokenizers):
            down.append("tokenizer")
        if down:
            return f"the {' and the '.join(down)} is being restarted"
        silence = time.monotonic() - self.heard_at
        return f"the engine has been silent for {silence:.0f} s" if silence > SILENCE else None

    async def stream(self, calls: list[Tokenize]) -> AsyncIterator[list[Piece]]:
        """The pieces of all sequences of the calls as they come, until each has its end: each time all that is waiting, one
        piece for a sequence. So to a client that is late, several tokens come as one.

        Raises RequestFailed as soon as one of them fails. Leaving early (use contextlib.aclosing) aborts the rest.
        """
        open_uids = {uid for call in calls for uid in call.uids}
        queue: asyncio.Queue[Piece | Failed] = asyncio.Queue()
        try:
            for call in calls:
                await self.submit(call, queue, generates=True)
            while open_uids:
                answers = [await queue.get()]
                while not queue.empty():
                    answers.append(queue.get_nowait())
                pieces = merged([answer for answer in answers if isinstance(answer, Piece)])
                open_uids.difference_update(piece.uid for piece in pieces if piece.finish_reason)
                if pieces:
                    yield pieces
                for failed in answers:
                    if isinstance(failed, Failed):
                        open_uids.difference_update(failed.uids)
                        raise RequestFailed(failed.status, failed.message)
        finally:
            self.abort(open_uids)

    async def tokenize(self, call: Tokenize) -> list[int]:
        return (await self.ask(call)).token_ids

    async def detokenize(self, token_ids: list[int]) -> str:
        return (await self.ask(Detokenize(self.new_uids(1), token_ids))).text

    def abort(self, uids: Iterable[int]) -> None:
        """These are not waited for any more. Every process that may have or get them is notified."""
        gone = {uid: sequence for uid in uids if (sequence := self.sequences.pop(uid, None))}
        holders = {SCHEDULER: [uid for uid, sequence in gone.items() if sequence.generates]}
        holders |= {
            name: [uid for uid, sequence in gone.items() if sequence.tokenizer == name] for name in self.tokenizers
        }
        for name, held in holders.items():
            if held:
                self.send(name, Abort(held))

    # --- calls on their way ---

    async def ask(self, message: Tokenize | Detokenize) -> Tokenized | Detokenized:
        answers: asyncio.Queue = asyncio.Queue()
        try:
            await self.submit(message, answers, generates=False)
            answer = await answers.get()
        finally:
            self.abort(message.uids)
        if isinstance(answer, Failed):
            raise RequestFailed(answer.status, answer.message)
        return answer

    async def submit(self, message: Tokenize | Detokenize, answers: asyncio.Queue, generates: bool) -> None:
        """Give a call to the tokenizer with the least to do. Waits for what is being restarted, if that is not the engine."""
        waited = 0.0
        while reason := self.health():
            if self.draining or not self.workers[SCHEDULER].up or waited > PATIENCE:
                raise RequestFailed(503, f"{reason}; try again later")
            await asyncio.sleep(0.05)
            waited += 0.05
        load = {name: 0 for name in self.tokenizers if self.workers[name].up}
        for sequence in self.sequences.values():
            if sequence.tokenizer in load:
                load[sequence.tokenizer] += 1
        name = min(load, key=load.get)
        for uid in message.uids:
            self.sequences[uid] = OpenSequence(answers, generates, name)
        self.send(name, message)

    def send(self, to: str, message: Message) -> None:
        send(self.workers[to].socket, message)

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
        if isinstance(message, Pieces):
            for piece in message.pieces:
                self.answer(piece.uid, piece, piece.finish_reason is not None)
        elif isinstance(message, Tokenized | Detokenized):
            self.answer(message.uid, message, True)
        elif isinstance(message, Failed) and message.uids:
            for uid in message.uids:
                self.answer(uid, message, True)
        elif isinstance(message, Failed):
            self.last_words[message.worker] = message
        elif isinstance(message, EngineStats):
            self.stats = message if self.workers[SCHEDULER].up else None
            self.heard_at = time.monotonic()
        elif isinstance(message, Ready):
            self.ready(message)

    def answer(self, uid: int, answer: Message | Piece, last: bool) -> None:
        if sequence := self.sequences.get(uid):
            sequence.answers.put_nowait(answer)
            sequence.tokenizer = None
            if last:
                del self.sequences[uid]

    # --- workers that come and go; the supervisor calls these ---

    def ready(self, message: Ready) -> None:
        worker = self.workers[message.worker]
        if message.incarnation == worker.incarnation:  # not from an earlier incarnation
            worker.up = True
            self.info |= message.info
            if message.worker == SCHEDULER:
                self.heard_at = time.monotonic()

    def lost(self, name: str) -> None:
        """A worker is dead: the calls that were with it fail."""
        self.workers[name].up = False
        self.workers[name].incarnation += 1
        if name in self.tokenizers:
            uids = [uid for uid, sequence in self.sequences.items() if sequence.tokenizer == name]
        else:
            uids = [uid for uid, sequence in self.sequences.items() if sequence.generates]
        if name == SCHEDULER:
            self.stats = None
        self.give_up(uids, 500, f"the {name.split('-')[0]} died while it had this request; try again")

    def give_up(self, uids: list[int], status: int, message: str) -> None:
        """These end with an error."""
        waiting = {uid: self.sequences[uid].answers for uid in uids}
        self.abort(uids)
        for uid, answers in waiting.items():
            answers.put_nowait(Failed([uid], status, message))

    async def drain(self, seconds: float) -> None:
        """Accept no further calls; let open answers go on for so long, then end them."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self.sequences:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.give_up(list(self.sequences), 503, "the server is shutting down")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.socket.close(linger=0)
        self.inbox.close()
        self.context.term()
