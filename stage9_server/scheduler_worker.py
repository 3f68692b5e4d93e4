"""The process of the engine. Its loop never waits for another process while there is something to compute."""

import os
import signal
import time
from dataclasses import replace
from functools import partial

from common.config import UserError
from common.device import resolve_device
from stage2_req.req import Output
from stage8_tp.build import build_rank
from stage8_tp.engine import TPEngine
from stage8_tp.launch import run_ranks
from stage8_tp.ranks import Alone, Ranks
from stage9_server.ipc import API, DETOKENIZER, Settings, Worker, last_words, read_settings, run_worker
from stage9_server.messages import Abort, Failed, Generate, Message, Started, Stats, Token, Tokens

STATS_INTERVAL = 1.0  # seconds
MAX_EARLY = 1 << 16  # uids


class Scheduling:
    """Between messages and the engine, which numbers its requests by itself."""

    def __init__(self, engine: TPEngine, max_queue: int):
        self.engine, self.max_queue = engine, max_queue
        self.ours: dict[int, int] = {}  # uid of the server -> of the engine
        self.theirs: dict[int, int] = {}  # and back
        self.early: dict[int, None] = {}  # aborted before they came; the oldest first

    def handle(self, message: Generate | Abort) -> list[tuple[str, Message]]:
        """[(who gets it, what)]"""
        return self.abort(message) if isinstance(message, Abort) else self.add(message)

    def add(self, call: Generate) -> list[tuple[str, Message]]:
        uids = [uid for uid in call.uids if self.early.pop(uid, uid) is not None]
        if not uids:
            return []
        queue = len(self.engine.scheduler.waiting) + len(uids) - len(self.engine.cache.free_rows)
        # those who find a free row don't wait, and one call alone fits always
        if queue > max(self.max_queue, len(uids)):
            return [(API, Failed(uids, 503, f"the queue is full ({self.max_queue} requests); try again later"))]
        result, seed = [], call.params.seed
        for i, uid in enumerate(uids):
            params = call.params if seed is None else replace(call.params, seed=seed + i)
            try:
                self.ours[uid] = self.engine.add(call.prompt_ids, params)
            except UserError as error:  # it refuses the first of a call, or none
                return [(API, Failed(uids, 400, str(error)))]
            self.theirs[self.ours[uid]] = uid
            echo = call.prompt_ids if call.echo else []
            result.append((DETOKENIZER, Started(uid, len(call.prompt_ids), call.stop, echo, call.continues)))
        return result

    def abort(self, message: Abort) -> list[tuple[str, Message]]:
        for uid in message.uids:
            if uid in self.ours:
                self.engine.abort(self.forget(uid))
            else:  # on its way, or done
                self.early[uid] = None
                if len(self.early) > MAX_EARLY:
                    del self.early[next(iter(self.early))]
        return [(DETOKENIZER, message)]

    def forget(self, uid: int) -> int:
        theirs = self.ours.pop(uid)
        del self.theirs[theirs]
        return theirs

    def step(self) -> Tokens:
        tokens = [self.token(output) for output in self.engine.step()]
        for token in tokens:
            if token.finish_reason:
                self.forget(token.uid)
        return Tokens(tokens)

    def token(self, output: Output) -> Token:
        cached, logprobs = getattr(output.req, "hit_len", 0), output.logprobs or (None, [])
        return Token(self.theirs[output.uid], output.token_id, output.finish_reason, cached, *logprobs)

    def stats(self) -> Stats:
        s, cache = self.engine.stats(), self.engine.cache
        return Stats(
            running=s.running,
            waiting=s.waiting,
            usage=s.usage,
            pages_free=cache.available(),
            pages_total=cache.allocator.num_pages,
            steps=s.steps,
            computed_tokens=s.computed_tokens,
            output_tokens=s.output_tokens,
            retracted=self.engine.scheduler.num_retracted,
            cache_hit_tokens=getattr(cache, "hit_tokens", 0),
            cache_lookup_tokens=getattr(cache, "lookup_tokens", 0),
        )


def serve(engine: TPEngine, worker: Worker) -> None:
    scheduling = Scheduling(engine, worker.settings.max_queue)
    worker.ready(max_len=engine.cache.max_len, vocab_size=engine.model.vocab_size, device=str(engine.device))
    told, busy, checked = 0.0, True, True
    while True:
        messages = worker.receive(wait=not busy)
        if not (busy or messages or checked):  # a second without anything to do, for the first time since there was
            engine.cache.check_integrity()
            checked = True
        for message in messages:
            for to, answer in scheduling.handle(message):
                worker.send(to, answer)
        if engine.has_work() and (tokens := scheduling.step()).tokens:
            worker.send(DETOKENIZER, tokens)
        was_busy, busy = busy, engine.has_work()
        checked = checked and not busy
        if was_busy > busy or time.monotonic() > told + STATS_INTERVAL:
            worker.send(API, scheduling.stats())
            told = time.monotonic()


def work(settings: Settings, ranks: Ranks | Alone) -> None:
    """One rank: the first one serves, the others follow it."""
    if ranks.rank == 0:
        with last_words(settings):
            worker = Worker(settings)
            serve(build_rank(settings.engine, ranks), worker)
    else:
        build_rank(settings.engine, ranks).follow()


def main(settings: Settings) -> None:
    """With one rank, this process; with more, this process only watches over them."""
    resolve_device(settings.engine.device)  # raises what the ranks would, where it can be told to the API server
    run_ranks(partial(work, settings), settings.engine.tp, settings.engine.device)


if __name__ == "__main__":
    if "RANK" in os.environ:  # one of those, who live and die with that process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        main(read_settings())
    else:
        run_worker(main)
