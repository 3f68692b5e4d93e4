"""Workers that die are started again. Without it the first death ends the server."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from common.config import UserError
from stage9_server.hub import Hub
from stage9_server.ipc import DETOKENIZER, SCHEDULER
from stage9_server.messages import EngineStats, Failed, Message, Ready
from stage9_server.workers import WorkerFailed, Workers, kill_session

SILENCE = 120.0  # seconds without a word after which the scheduler no longer counts as healthy: longer than any step
PATIENCE = 60.0  # seconds that a call waits for a tokenizer or the detokenizer to come back
RESTARTS = {SCHEDULER: 3, DETOKENIZER: 10, "tokenizer": 10}  # deaths in RESTART_WINDOW after which we give up
RESTART_WINDOW = 600.0  # seconds


class FetchFailed(WorkerFailed):
    """The model can't be had. The process that was to fetch it has said why; `status` is its exit status."""

    def __init__(self, status: int):
        super().__init__("")
        self.status = status


@dataclass
class Peer:
    """A worker. What is still in the socket to it when its process dies finds the next one."""

    incarnation: int = 0
    failed: Failed | None = None  # the last words of one that ended: uids empty, status the exit status


class RestartingHub(Hub):
    """Calls fail that were with a worker when it died, and the others wait for the next one."""

    def __init__(self, folder: str, tokenizers: int):
        super().__init__(folder, tokenizers)
        self.peers = {name: Peer() for name in self.names}
        self.heard_at = 0.0  # when the scheduler last sent anything; it has to, once per second

    def health(self) -> str | None:
        if reason := super().health():
            return reason
        down = [name for name in (SCHEDULER, DETOKENIZER) if name not in self.up]
        if not self.up.intersection(self.tokenizers):
            down.append("tokenizer")
        if down:
            return f"the {' and the '.join(down)} is being restarted"
        silence = time.monotonic() - self.heard_at
        return f"the engine has been silent for {silence:.0f} s" if silence > SILENCE else None

    async def available(self) -> None:
        """Waits for what is being restarted, if that is not the engine."""
        waited = 0.0
        while self.health():
            if self.draining or SCHEDULER not in self.up or waited > PATIENCE:
                await super().available()
            await asyncio.sleep(0.05)
            waited += 0.05

    def handle(self, message: Message) -> None:
        match message:
            case Ready() if message.incarnation != self.peers[message.worker].incarnation:
                return  # from an earlier incarnation
            case EngineStats() if SCHEDULER not in self.up:
                self.heard_at = time.monotonic()
                return
            case Failed(uids=[]):
                self.peers[message.worker].failed = message
            case EngineStats() | Ready(worker="scheduler"):
                self.heard_at = time.monotonic()
        super().handle(message)

    def lost(self, name: str) -> None:
        """A worker is dead: the calls that were with it fail."""
        self.up.discard(name)
        self.peers[name].incarnation += 1
        if name in self.tokenizers:
            uids = [uid for uid, sequence in self.sequences.items() if sequence.tokenizer == name]
        else:
            uids = [uid for uid, sequence in self.sequences.items() if sequence.generates]
        if name == SCHEDULER:
            self.stats = None
        self.give_up(uids, 500, f"the {name.split('-')[0]} died while it had this request; try again")

    async def drain(self, seconds: float) -> None:
        """What is still open then ends with an error, which says why."""
        await super().drain(seconds)
        self.give_up(list(self.sequences), 503, "the server is shutting down")

    def give_up(self, uids: list[int], status: int, message: str) -> None:
        """These end with an error."""
        waiting = {uid: self.sequences[uid].answers for uid in uids}
        self.abort(uids)
        for uid, answers in waiting.items():
            answers.put_nowait(Failed([uid], status, message))


class Supervisor(Workers):
    guard = True
    hub: RestartingHub

    def __init__(self, *args):
        super().__init__(*args)
        self.announced: set[str] = set()  # workers whose process has been printed

    async def all_up(self) -> None:
        """Also on the terminal, so that whoever waits for the server's address knows all its processes by then."""
        while len(self.announced) < len(self.hub.names):
            await asyncio.sleep(0.02)

    async def run(self) -> None:
        """Fetch the model, once for all; then keep every worker alive. Raises what makes no sense to go on with."""
        if not self.settings["engine"].model.startswith("dummy:"):
            await self.fetch(self.settings["engine"].model)
        await asyncio.gather(*map(self.keep, self.hub.names))

    async def fetch(self, model: str) -> None:
        """In a process of its own: converting a model takes PyTorch, which would stay in this one."""
        process = await self.start("fetch", "common.fetch", model)
        status = await process.wait()
        if not self.stopping:
            del self.processes["fetch"]
            if status:
                raise FetchFailed(status)

    async def keep(self, name: str) -> None:
        """Start a worker, again and again. Raises UserError or WorkerFailed once that makes no sense."""
        kind, peer, deaths, was_up = name.split("-")[0], self.hub.peers[name], deque(), False
        while True:
            process = await self.spawn(name, peer.incarnation)
            end = asyncio.ensure_future(process.wait())
            while name not in self.hub.up and not end.done():
                await asyncio.wait({end}, timeout=0.02)
            if name in self.hub.up:
                was_up = True
                print(f"{name} is ready (process {process.pid})", flush=True)
                self.announced.add(name)
            status = await end
            kill_session(process.pid)  # what it has left behind
            if self.stopping:
                return
            self.hub.lost(name)
            await asyncio.sleep(0.1)  # for its Failed message
            words = peer.failed.message if peer.failed else f"it ended with status {status}"
            peer.failed = None
            if not was_up:
                raise UserError(words) if status == 2 else WorkerFailed(f"the {name} could not start: {words}")
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > RESTART_WINDOW:
                deaths.popleft()
            if len(deaths) > RESTARTS[kind]:
                raise WorkerFailed(f"the {name} died {len(deaths)} times in {RESTART_WINDOW / 60:g} minutes: {words}")
            print(f"{name} died ({words}); starting it again", flush=True)
