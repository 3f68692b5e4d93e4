"""What the scheduler's process does about grammars: calls wait for theirs outside the engine, so that no other request waits
with them; and those whose grammar became too much end with an error."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from common.checkpoint import load_config
from common.config import EngineConfig
from stage2_req.parts import Sampler
from stage2_req.sampling import GumbelSampler
from stage9_server.grammar.compiler import Compiler, read_vocabulary
from stage9_server.grammar.sampler import GrammarSampler
from stage9_server.ipc import API, DETOKENIZER
from stage9_server.messages import Abort, Failed, Generate, Message

if TYPE_CHECKING:
    from stage9_server.scheduler_worker import Scheduling


class Admission:
    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self.held: list[tuple[Generate, Future[None]]] = []
        self.outbox: list[tuple[str, Message]] = []

    def hold(self, call: Generate) -> bool:
        """Has the call to wait?"""
        if not call.params.grammar:
            return False
        done = self.compiler.prepare(call.params.grammar)
        if done.done() and not done.exception():
            return False
        self.held.append((call, done))
        return True

    @property
    def num_held(self) -> int:
        """Sequences."""
        return sum(len(call.uids) for call, _ in self.held)

    @property
    def patience(self) -> float:
        """Seconds for which the loop may wait for messages."""
        return 0.005 if self.held or self.outbox else 1

    def take(self) -> list[tuple[Generate, str]]:
        """Calls whose wait is over; with why the grammar can't be used, or an empty text."""
        over = [(call, done) for call, done in self.held if done.done()]
        self.held = [(call, done) for call, done in self.held if not done.done()]
        return [(call, str(done.exception() or "")) for call, done in over]

    def end_failed(self, scheduling: "Scheduling") -> None:
        """End sequences whose grammar became too much in this step, before their tokens go out."""
        for uid, reason in self.compiler.take_failed().items():
            if uid in scheduling.live:
                del scheduling.live[uid]
                scheduling.engine.abort(uid)
                self.outbox.append((API, Failed([uid], 400, f"the grammar takes too much time here: {reason}")))
                self.outbox.append((DETOKENIZER, Abort([uid])))

    def settle(self, scheduling: "Scheduling") -> list[tuple[str, Message]]:
        """Let the calls go on whose grammar is there, or can't be. Returns what is to be sent, [(receiver, message)]."""
        answers, self.outbox = self.outbox, []
        for call, error in self.take():
            answers += [(API, Failed(call.uids, 400, error))] if error else scheduling.add(call)
        return answers


class FreeText:
    """The null form: for an engine whose sampler reads no grammars."""

    num_held, patience = 0, 1.0

    def hold(self, call: Generate) -> bool:
        return False

    def end_failed(self, scheduling: "Scheduling") -> None:
        pass

    def settle(self, scheduling: "Scheduling") -> list[tuple[str, Message]]:
        return []


FREE_TEXT = FreeText()


def make_grammars(config: EngineConfig) -> tuple[Admission, Callable[[ModuleType], Sampler]]:
    """Both sides of it, for the model's vocabulary: at the engine's door, and the maker of its sampler."""
    shape, _ = load_config(config.model)
    compiler = Compiler(partial(read_vocabulary, config.model, shape.eos_ids, shape.vocab_size), shape.eos_ids)
    compiler.begin()
    return Admission(compiler), lambda ops: GrammarSampler(GumbelSampler(ops), compiler)
