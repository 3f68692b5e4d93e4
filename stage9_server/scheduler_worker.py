"""The process of the engine. Its loop never waits for another process while there is something to compute."""

import time
from dataclasses import asdict, replace
from functools import partial

from common.config import UserError
from common.device import resolve_device
from stage2_req.engine import Engine
from stage2_req.req import Output
from stage8_tp.build import build_rank
from stage8_tp.engine import TPEngine
from stage8_tp.launch import run_ranks
from stage8_tp.ranks import Alone, Ranks
from stage9_server.grammar.admission import FREE_TEXT, Admission, FreeText, make_grammars
from stage9_server.guard.process import last_words, run_worker
from stage9_server.inspector.live import Watching
from stage9_server.inspector.messages import Inspect
from stage9_server.ipc import API, DETOKENIZER, Envelope, Settings, Worker
from stage9_server.messages import Abort, Accepted, EngineStats, Failed, Generate, Started, Stopped, Token, Tokens

STATS_INTERVAL = 1.0  # seconds
MAX_EARLY = 1 << 16  # uids


class Scheduling:
    """Between messages and the engine."""

    def __init__(self, engine: Engine | TPEngine, max_queue: int, grammars: Admission | FreeText = FREE_TEXT):
        self.engine, self.max_queue, self.grammars = engine, max_queue, grammars
        self.live: dict[int, Started | None] = {}  # uids in the engine -> what the detokenizer still has to learn
        self.early: dict[int, None] = {}  # aborted before they came; the oldest first

    def handle(self, message: Generate | Abort | Stopped) -> list[Envelope]:
        """[(receiver, message)]"""
        if isinstance(message, Generate):
            return self.add(message)
        for uid in message.uids:
            if uid in self.live:
                del self.live[uid]
                self.engine.abort(uid)
            elif isinstance(message, Abort):  # on its way, or done
                self.early[uid] = None
                if len(self.early) > MAX_EARLY:
                    del self.early[next(iter(self.early))]
        return [(DETOKENIZER, message)] if isinstance(message, Abort) else []

    def add(self, call: Generate) -> list[Envelope]:
        uids = [uid for uid in call.uids if uid not in self.early]
        for uid in call.uids:
            self.early.pop(uid, None)
        if not uids:
            return []
        stats = self.engine.stats()
        queue = stats.waiting + self.grammars.num_held + len(uids) - stats.free_requests
        # requests that can run at once don't wait, and one call alone fits always
        if queue > max(self.max_queue, len(uids)):
            return [(API, Failed(uids, 503, f"the queue is full ({self.max_queue} requests); try again later"))]
        call.uids = uids
        if self.grammars.hold(call):
            return []
        seed, echo = call.params.seed, call.prompt_ids if call.options.echo else []
        for i, uid in enumerate(uids):
            params = call.params if seed is None else replace(call.params, seed=seed + i)
            try:
                self.engine.add(call.prompt_ids, params, uid)
            except UserError as error:  # it refuses the first of a call, or none
                return [(API, Failed(uids, 400, str(error)))]
            self.live[uid] = Started(uid, len(call.prompt_ids), call.options, echo)
        return [(API, Accepted(uids))]

    def step(self) -> Tokens:
        outputs, tokens, started = self.engine.step(), [], []
        self.grammars.end_failed(self)
        for output in (output for output in outputs if output.uid in self.live):  # and was not ended just now
            tokens.append(self.token(output))
            if first := self.live[output.uid]:
                first.queue_seconds = output.req.admitted_at - output.req.arrived_at
                started.append(first)
            self.live[output.uid] = None
            if output.finish_reason:
                del self.live[output.uid]
        return Tokens(tokens, started)

    @staticmethod
    def token(output: Output) -> Token:
        cached, logprobs = output.req.cached_tokens or 0, output.logprobs or (None, [])
        output.req.logprobs.clear()  # only engine.generate returns what is collected there
        return Token(output.uid, output.token_id, output.finish_reason, cached, *logprobs, output.prompt_logprobs or [])

    def stats(self) -> EngineStats:
        stats = self.engine.stats()
        return EngineStats(*(getattr(stats, name) for name in EngineStats.__struct_fields__))


def serve(engine: Engine | TPEngine, worker: Worker, grammars: Admission | FreeText = FREE_TEXT) -> None:
    scheduling = Scheduling(engine, worker.settings.max_queue, grammars)
    watching = Watching(engine, worker.settings.engine.model)
    facts = {"max_len": engine.cache.max_len, "vocab_size": engine.model.vocab_size, "device": str(engine.device)}
    worker.ready(model=worker.settings.engine.model, engine=asdict(worker.settings.engine), **facts)
    reported, busy, checked = 0.0, True, True
    while True:
        messages = worker.receive(wait=not busy, seconds=grammars.patience)
        if not (busy or messages or checked):  # a second without anything to do, for the first time since there was
            engine.cache.check_integrity()
            checked = True
        answers = [a for m in messages for a in (watching if isinstance(m, Inspect) else scheduling).handle(m)]
        for to, answer in answers + grammars.settle(scheduling):
            worker.send(to, answer)
        if engine.has_work() and (tokens := scheduling.step()).tokens:
            worker.send(DETOKENIZER, tokens)
        if lines := watching.news():
            worker.send(API, lines)
        was_busy, busy = busy, engine.has_work()
        checked = checked and not busy
        if was_busy > busy or time.monotonic() > reported + STATS_INTERVAL:
            worker.send(API, scheduling.stats())
            reported = time.monotonic()


def work(settings: Settings, ranks: Ranks | Alone) -> None:
    """One rank: the first one serves, the others follow it."""
    if ranks.rank == 0:
        with last_words(settings):
            worker = Worker(settings)
            grammars, sampler = make_grammars(settings.engine)
            serve(build_rank(settings.engine, ranks, sampler), worker, grammars)
    else:
        build_rank(settings.engine, ranks).follow()


def main(settings: Settings) -> None:
    """With one rank, this process; with more, this process only watches over them."""
    resolve_device(settings.engine.device)  # raises what the ranks would, here, where the error reaches the API server
    run_ranks(partial(work, settings), settings.engine.tp, settings.engine.device)


if __name__ == "__main__":
    run_worker(main)
