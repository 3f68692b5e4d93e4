"""What the workers make of their messages: prompts, limits and failures at the tokenizer; requests, aborts and the queue
at the scheduler; and the hub, which knows which call waits for what.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import aclosing

import pytest

from common.config import EngineConfig, UserError
from common.tokenizer import load_tokenizer
from stage7_radix.params import RequestParams
from stage8_tp.build import build_engine
from stage9_server import tokenizer_worker
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.detokenizer_worker import Detokenizing
from stage9_server.guard.guard import NoGuard
from stage9_server.guard.restarts import SILENCE
from stage9_server.guard.restarts import RestartingHub as Hub
from stage9_server.guard.texts import NoTextLimits, TextLimits, sort_in
from stage9_server.hub import RequestFailed
from stage9_server.ipc import API, DETOKENIZER, SCHEDULER, Settings
from stage9_server.local_server import ROOT
from stage9_server.messages import (
    Abort,
    Accepted,
    Detokenize,
    Detokenized,
    EngineStats,
    Failed,
    Generate,
    Piece,
    Pieces,
    Ready,
    Started,
    TextOptions,
    Tokenize,
    Tokenized,
    Tokens,
    decode,
    encode,
)
from stage9_server.openai_api.app import Api
from stage9_server.scheduler_worker import Scheduling, serve
from stage9_server.tokenizer_worker import Tokenizing

OPTIONS = TextOptions(["x"], continues=True, echo=True)
PARAMS = RequestParams(temperature=0.5, cache_salt="s")
BOS = 0


@pytest.mark.parametrize("process", ["launch", "tokenizer_worker", "detokenizer_worker", "client"])
def test_a_process_that_does_not_compute_starts_without_pytorch(process):
    code = f"import sys, stage9_server.{process}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- tokenizer ---


@pytest.fixture(scope="module")
def tokenizer(text_checkpoint):
    return load_tokenizer(str(text_checkpoint.path))


@pytest.fixture(scope="module")
def tokenizing(tokenizer):
    return Tokenizing(tokenizer, TextLimits(1.0))


def call(**changes) -> Tokenize:
    return Tokenize(**{"uids": [1], "params": PARAMS, "max_len": 100} | changes)


def chat(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_a_prompt_goes_to_the_scheduler(tokenizing):
    to, message = tokenizing.handle(call(uids=[1, 2], text="hi", options=OPTIONS, max_tokens=7))
    assert to == SCHEDULER
    assert decode(encode(message)) == message
    expected = RequestParams(temperature=0.5, cache_salt="s", max_tokens=7)
    assert message == Generate([1, 2], tokenizing.tokenizer.encode("hi"), expected, OPTIONS)


@pytest.mark.parametrize(("what", "starts"), [
    ({"text": "hi"}, 1),
    ({"text": "hi", "special": False}, 0),
    ({"text": "<s>hi"}, 1),
    ({"text": "<s>hi", "special": False}, 1),
    ({"messages": chat("hi")}, 1),
    ({"token_ids": [5, 6]}, 0),
])  # fmt: skip
def test_one_start_token_and_no_more(tokenizing, what, starts):
    ids = tokenizing.handle(call(**what))[1].prompt_ids
    assert ids.count(BOS) == starts
    assert BOS not in ids[1:]


def test_ids_are_taken_as_they_are(tokenizing):
    assert tokenizing.handle(call(token_ids=[5, 6, 5]))[1].prompt_ids == [5, 6, 5]


def test_max_tokens(tokenizing):
    def tokens(**changes):
        return tokenizing.handle(call(token_ids=[5] * 30, **changes))[1].params.max_tokens

    assert tokens() == 70
    assert tokens(max_tokens=5) == 5
    assert tokens(max_len=30) == 1


@pytest.mark.parametrize("what", [
    {"token_ids": [5] * 101},
    {"text": "a" * 100},  # and the start token
    {"text": "a" * 10_000},
    {"messages": chat("a" * 100)},
    {"messages": chat("é" * 100_000)},
])  # fmt: skip
def test_prompts_that_are_too_long(tokenizing, what):
    to, failed = tokenizing.handle(call(uids=[4, 5], **what))
    assert (to, failed.uids, failed.status) == (API, [4, 5], 400)
    assert "maximum context length is 100 tokens" in failed.message


def test_counting_and_showing_tokens(tokenizing):
    to, message = tokenizing.handle(call(text="hi" * 200, params=None))  # no limit where nothing is generated
    assert to == API and len(message.token_ids) == 401
    assert tokenizing.handle(Detokenize([3], message.token_ids)) == (API, Detokenized(3, "<s>" + "hi" * 200))


@pytest.mark.parametrize("message", [
    call(messages=chat("fail")),  # the template raises
    call(messages=[{"content": "no role"}, 5]),
    call(text="a", max_tokens=0),
    Detokenize([1], [-1]),
    Detokenize([1], [1 << 40]),
])  # fmt: skip
def test_a_failure_is_told_and_passes(tokenizing, message):
    to, failed = tokenizing.handle(message)
    assert (to, type(failed), failed.uids, failed.status) == (API, Failed, [1], 400)
    assert len(failed.message) > 10
    assert isinstance(tokenizing.handle(call(messages=chat("hi")))[1], Generate)


def test_an_endless_template_is_stopped(tokenizing, tokenizer, monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(tokenizer.hf, "chat_template", endless)
    assert "longer than 1 s" in tokenizing.handle(call(messages=chat("hi")))[1].message
    monkeypatch.undo()
    assert isinstance(tokenizing.handle(call(messages=chat("hi")))[1], Generate)


def test_code_that_python_can_not_interrupt_ends_the_process():
    """A regular expression gone wild, say: no signal handler of Python runs."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with TextLimits(0.5).watch():
                sum(range(10**12))  # all in C
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGVTALRM


def test_aborts_take_calls_out_of_the_queue():
    queue = deque()
    first, second = Tokenize([1, 2], text="a"), Tokenize([3], text="b")
    sort_in(queue, [first, second, Detokenize([4], [5]), Abort([1, 3, 9])])
    assert list(queue) == [Tokenize([2], text="a"), Detokenize([4], [5])]
    sort_in(queue, [Abort([2, 4]), second])
    assert list(queue) == [second]


def test_the_queue_is_left_between_two_calls(tokenizing):
    looks = [call(uids=[1], text="a"), call(uids=[2], text="b")], [Abort([2]), call(uids=[3], text="c")], []
    worker = Script(*looks, at_every_look=True)
    with pytest.raises(StopIteration):
        tokenizer_worker.serve(tokenizing, worker)
    assert [message.uids for _, message in worker.sent] == [[1], [3]]


def test_too_many_tokens_for_a_text(tokenizing):
    assert "at most 131072" in tokenizing.handle(Detokenize([1], [5] * 131073))[1].message


def test_a_model_without_a_template(tokenizing, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    assert "no chat template" in tokenizing.handle(call(messages=chat("hi")))[1].message


# --- scheduler ---


@pytest.fixture(scope="module")
def engine(text_checkpoint):
    return build_engine(text_checkpoint.config(max_running=4, kv_tokens=640, page_size=16, max_batch_tokens=64))


@pytest.fixture
def scheduling(engine):
    yield Scheduling(engine, max_queue=3)
    for req in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.abort(req.uid)
    while engine.has_work():
        engine.step()
    engine.cache.check_integrity()


def generate(*uids: int, prompt=(5, 6, 7), **params) -> Generate:
    return Generate(list(uids), list(prompt), RequestParams(**{"max_tokens": 4, "ignore_eos": True} | params))


def finish(scheduling: Scheduling, *steps: Tokens) -> dict[int, list]:
    """uid -> its tokens, those of earlier steps first. What the detokenizer has to know comes once, with the first."""
    result, started = {}, Counter()
    while scheduling.engine.has_work() or steps:
        step, *steps = steps or [scheduling.step()]
        started.update(each.uid for each in step.started)
        for token in step.tokens:
            result.setdefault(token.uid, []).append(token)
    assert not set(started.values()) - {1}
    return result


def test_sequences_of_a_call(scheduling):
    message = Generate([11, 12], [5, 6, 7], RequestParams(max_tokens=4, ignore_eos=True), OPTIONS)
    assert scheduling.handle(message) == [(API, Accepted([11, 12]))]
    first = scheduling.step()
    while not first.tokens:
        first = scheduling.step()
    assert all(0 <= started.queue_seconds < 60 for started in first.started)
    told = [Started(started.uid, started.prompt_tokens, started.options, started.echo_ids) for started in first.started]
    assert told == [Started(uid, 3, OPTIONS, [5, 6, 7]) for uid in (11, 12)]
    tokens = finish(scheduling, first)
    assert [t.token_id for t in tokens[11]] == [t.token_id for t in tokens[12]]
    assert [t.finish_reason for t in tokens[11]] == [None, None, None, "max_tokens"]
    assert not scheduling.live


def test_the_engine_knows_a_sequence_by_its_uid_in_the_server(scheduling):
    scheduling.handle(generate(700, 31, max_tokens=9))
    assert {req.uid for req in scheduling.engine.scheduler.waiting} == {700, 31} == set(scheduling.live)
    scheduling.handle(Abort([700]))
    assert {req.uid for req in scheduling.engine.scheduler.waiting} == {31} == set(scheduling.live)
    scheduling.step()
    assert set(finish(scheduling)) == {31}
    assert not scheduling.live


def test_sequences_of_a_call_draw_differently_and_the_same_again(scheduling):
    def texts(uids):
        scheduling.handle(generate(*uids, temperature=1.0, seed=3, max_tokens=12))
        tokens = finish(scheduling)
        return [[t.token_id for t in tokens[uid]] for uid in uids]

    first, second = texts([1, 2])
    assert first != second
    assert texts([3, 4]) == [first, second]


def test_logprobs_and_cached_tokens(scheduling):
    prompt = list(range(10, 60))
    for uid, cached in ((1, 0), (2, 48)):
        scheduling.handle(generate(uid, prompt=prompt, logprobs=2))
        for token in finish(scheduling)[uid]:
            assert token.cached_tokens == cached
            assert token.top_logprobs[0] == (token.token_id, token.logprob)
            assert len(token.top_logprobs) == 2


@pytest.mark.parametrize(
    "what", [{"prompt": [5] * 513}, {"prompt": []}, {"prompt": [9999]}, {"stop_token_ids": {9999}}]
)
def test_what_the_engine_refuses_is_the_callers_mistake(scheduling, what):
    ((to, failed),) = scheduling.handle(generate(1, 2, **what))
    assert (to, failed.uids, failed.status) == (API, [1, 2], 400)
    assert not scheduling.engine.has_work() and not scheduling.live


def test_the_queue_has_an_end(scheduling):
    for uid in range(4 + 3):  # those that can run, and those that may wait
        assert scheduling.handle(generate(uid)) == [(API, Accepted([uid]))]
    ((to, failed),) = scheduling.handle(generate(7))
    assert (to, failed.uids, failed.status) == (API, [7], 503)
    assert set(finish(scheduling)) == set(range(7))
    assert scheduling.handle(generate(8)) == [(API, Accepted([8]))]
    finish(scheduling)
    assert scheduling.handle(generate(*range(10, 26))) == [
        (API, Accepted(list(range(10, 26))))
    ]  # one call is never too many by itself


def test_aborts_before_during_and_after(scheduling):
    early, late = Abort([1, 3]), Abort([2])
    assert scheduling.handle(early) == [(DETOKENIZER, early)]
    assert scheduling.handle(generate(1, 2, 3, max_tokens=50)) == [(API, Accepted([2]))]
    assert set(scheduling.live) == {2}
    scheduling.step()
    assert scheduling.handle(late) == [(DETOKENIZER, late)]
    assert finish(scheduling) == {}
    scheduling.handle(generate(1))
    assert set(finish(scheduling)) == {1}  # an abort counts once
    assert scheduling.handle(Abort([1])) == [(DETOKENIZER, Abort([1]))]


class Script:
    """A worker whose inbox holds these messages: a list for every time that it waits for some, or that it looks."""

    settings = Settings(SCHEDULER, 0, "", 0, EngineConfig(), max_queue=3)

    def __init__(self, *script: list, at_every_look: bool = False):
        self.script, self.at_every_look, self.sent = iter(script), at_every_look, []

    def receive(self, wait: bool, seconds: float = 1) -> list:
        return next(self.script) if wait or self.at_every_look else []  # raises StopIteration at the end

    def ready(self, **info) -> None:
        pass

    def send(self, to: str, message) -> None:
        self.sent.append((to, message))


def test_memory_is_looked_at_in_the_pauses(engine, monkeypatch):
    """And not where an answer would wait for it."""
    checks = []
    monkeypatch.setattr(engine.cache, "check_integrity", lambda: checks.append(engine.has_work()))
    with pytest.raises(StopIteration):
        serve(engine, Script([], [generate(81)], [generate(82)]))
    assert checks == []
    with pytest.raises(StopIteration):
        serve(engine, Script([], [generate(83)], [], [], [generate(84)], []))
    assert checks == [False, False]


def test_random_requests_and_aborts_leave_nothing(engine, tokenizer):
    """Scheduler and detokenizer together: every sequence has one end, and in the end all pages are free."""
    scheduling, detokenizing = Scheduling(engine, max_queue=10_000), Detokenizing(tokenizer)
    rng, open_uids, ends, aborted, uid = random.Random(0), [], {}, set(), 0

    def deliver(answers):
        for to, message in answers:
            if to == DETOKENIZER:
                deliver(detokenizing.handle(message))
            elif to == SCHEDULER:
                deliver(scheduling.handle(message))
            elif isinstance(message, Pieces):
                for piece in message.pieces:
                    if piece.finish_reason:
                        assert piece.uid not in ends
                        ends[piece.uid] = piece.finish_reason

    while uid < 150 or engine.has_work():
        if uid < 150 and rng.random() < 0.7:
            n = rng.choice([1, 1, 1, 3])
            uids, uid = list(range(uid, uid + n)), uid + n
            open_uids += uids
            params = RequestParams(
                max_tokens=rng.randint(1, 20),
                temperature=rng.choice([0.0, 1.5]),
                presence_penalty=rng.choice([0, 0, 1]),
                logprobs=rng.choice([None, None, 2]),
            )
            prompt = [2 + i % 50 for i in range(rng.randint(1, 90))]
            message = Generate(uids, prompt, params, TextOptions(rng.choice([[], ["e"], ["\ufffd", "ab"]])))
            if rng.random() < 0.1:
                deliver(scheduling.handle(Abort(uids[:1])))
                aborted.add(uids[0])
            deliver(scheduling.handle(decode(encode(message))))
        if open_uids and rng.random() < 0.3:
            gone = rng.sample(open_uids, min(3, len(open_uids)))
            aborted.update(gone)
            deliver(scheduling.handle(Abort(gone)))
        deliver([(DETOKENIZER, scheduling.step())])
    stats = scheduling.stats()
    assert stats.free_pages == stats.num_pages and stats.running == stats.waiting == 0
    engine.cache.check_integrity()
    assert not detokenizing.sequences and not scheduling.live
    assert set(ends) | aborted == set(range(uid))
    assert {"stop", "length"} == set(ends.values())


# --- hub: the workers are played by the test ---


@pytest.fixture
def folder(tmp_path_factory):
    path = tempfile.mkdtemp(prefix="t-")  # pytest's own are too long for a socket's name
    yield path
    shutil.rmtree(path)


def play(folder, script, tokenizers: int = 2) -> None:
    """Run script(hub, sent); `sent` collects what the hub sends. All workers are up in the beginning."""

    async def main():
        hub, sent = Hub(folder, tokenizers), []
        hub.send = lambda to, message: sent.append((to, message))
        for name in hub.names:
            hub.handle(Ready(name, 0, {"max_len": 100}))
        try:
            await asyncio.wait_for(script(hub, sent), 60)
        finally:
            hub.close()

    asyncio.run(main())


def piece(uid: int, text: str = "", reason: str | None = None) -> Piece:
    return Piece(uid, text, [7], reason, 3, 0)


async def collect(hub: Hub, *calls: Tokenize) -> list:
    """[pieces or error]"""
    result = []
    try:
        async with aclosing(hub.stream(list(calls))) as stream:
            async for pieces in stream:
                result += pieces
    except RequestFailed as error:
        result.append((error.status, error.message))
    return result


async def start(hub: Hub, *calls: Tokenize) -> asyncio.Task:
    task = asyncio.ensure_future(collect(hub, *calls))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def test_calls_are_dealt_to_the_tokenizer_with_least_to_do(folder):
    async def script(hub, sent):
        tasks = [await start(hub, call(uids=[uid], text="a")) for uid in (1, 2, 3)]
        names = [to for to, _ in sent]
        assert set(names[:2]) == {"tokenizer-0", "tokenizer-1"}
        other = names[2]
        hub.handle(Pieces([piece(uid) for uid, name in zip((1, 2, 3), names, strict=True) if name != other]))
        tasks.append(await start(hub, call(uids=[4], text="a")))
        assert sent[-1][0] != other
        for task in tasks:
            task.cancel()

    play(folder, script)


def test_pieces_of_several_calls_come_as_one(folder):
    async def script(hub, sent):
        task = await start(hub, call(uids=[1, 2], text="a"), call(uids=[3], text="b"))
        hub.handle(Pieces([piece(1), piece(3), piece(99)]))
        hub.handle(Pieces([piece(2, "x", "stop"), piece(1, "ab", "length"), piece(2, "late")]))
        hub.handle(Pieces([piece(3, "y", "stop")]))
        assert [(p.uid, p.text, len(p.token_ids)) for p in await task] == [(1, "ab", 2), (3, "y", 2), (2, "x", 1)]
        assert not hub.sequences
        assert not [message for _, message in sent if isinstance(message, Abort)]

    play(folder, script)


def test_nothing_is_handed_out_before_the_engine_has_all_of_a_call(folder):
    """So a call that fails in part has a status of its own; and then a client is told at once that it will be answered."""

    async def script(hub, sent):
        stream = hub.stream([call(uids=[1], text="a"), call(uids=[2, 3], text="b")])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for message in (Accepted([1]), Pieces([piece(1, "early")]), Accepted([2])):
            hub.handle(message)
            await asyncio.sleep(0)
            assert not first.done()
        hub.handle(Accepted([3]))
        assert [p.text for p in await first] == ["early"]
        await stream.aclose()
        stream = hub.stream([call(uids=[4], text="a")])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        hub.handle(Accepted([4]))
        assert await first == []
        await stream.aclose()

    play(folder, script)


def test_a_failure_ends_the_call_and_aborts_the_rest(folder):
    async def script(hub, sent):
        task = await start(hub, call(uids=[1], text="a"), call(uids=[2, 3], text="b"))
        hub.handle(Pieces([piece(2), piece(3, "", "stop")]))
        hub.handle(Failed([1], 400, "no"))
        assert (await task)[-1] == (400, "no")
        assert sent[-1] == (SCHEDULER, Abort([2]))
        assert not hub.sequences

    play(folder, script)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_aborts(folder, begun):
    async def script(hub, sent):
        task = await start(hub, call(uids=[1, 2], text="a"))
        if begun:
            hub.handle(Pieces([piece(1, "", "stop"), piece(2)]))
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        if begun:
            assert sent[1:] == [(SCHEDULER, Abort([2]))]
        else:  # it may still be where it was sent first
            assert sent[1:] == [(SCHEDULER, Abort([1, 2])), (sent[0][0], Abort([1, 2]))]
        assert not hub.sequences

    play(folder, script)


def api_of(hub: Hub) -> Api:
    return Api(hub, ["m"], NoGuard(), tool_format=None)


def test_asking_a_tokenizer(folder):
    async def script(hub, sent):
        task = asyncio.ensure_future(api_of(hub).ask(call(uids=[1], text="a", params=None)))
        await asyncio.sleep(0)
        hub.handle(Tokenized(1, [7]))
        assert (await task).token_ids == [7]
        task = asyncio.ensure_future(api_of(hub).ask(Detokenize([8], [7])))
        await asyncio.sleep(0)
        hub.handle(Failed(sent[-1][1].uids, 400, "no"))
        with pytest.raises(RequestFailed, match="no"):
            await task

    play(folder, script)


def test_which_calls_suffer_from_which_death(folder):
    async def script(hub, sent):
        asked = asyncio.ensure_future(api_of(hub).ask(call(uids=[9], text="a", params=None)))
        await asyncio.sleep(0)
        tasks = {uid: await start(hub, call(uids=[uid], text="a")) for uid in (1, 2, 3)}
        at = {message.uids[0]: to for to, message in sent}
        assert at[1] == at[3] != at[2] == at[9]
        hub.handle(Pieces([piece(1)]))  # has left the tokenizer
        hub.lost(at[1])
        assert sent[-2:] == [(SCHEDULER, Abort([3])), (at[3], Abort([3]))]
        assert (await tasks[3])[0][0] == 500
        assert hub.health() is None  # the other one is there
        hub.lost(DETOKENIZER)
        assert "detokenizer" in hub.health()
        assert sent[-2:] == [(SCHEDULER, Abort([1, 2])), (at[2], Abort([2]))]
        for uid in (1, 2):
            (*_, (status, message)) = await tasks[uid]
            assert status == 500 and "detokenizer died" in message
        hub.handle(Tokenized(9, [7]))  # it asks a tokenizer only
        assert (await asked).token_ids == [7]

    play(folder, script)


def test_an_engine_that_says_nothing_is_not_healthy(folder):
    async def script(hub, sent):
        assert hub.health() is None
        hub.heard_at -= SILENCE + 1
        assert "silent" in hub.health()
        hub.handle(EngineStats(*[0] * 11))
        assert hub.health() is None

    play(folder, script)


def test_a_dead_scheduler_is_known_at_once(folder):
    async def script(hub, sent):
        task = await start(hub, call(text="a"))
        hub.lost(SCHEDULER)
        assert "scheduler" in hub.health() and hub.stats is None
        assert (await task)[0][0] == 500
        assert (await collect(hub, call(uids=[2], text="a")))[0][0] == 503
        hub.handle(Ready(SCHEDULER, 0, {}))  # sent before it died
        assert hub.health()
        hub.handle(Ready(SCHEDULER, 1, {"max_len": 50}))
        assert hub.health() is None and hub.info["max_len"] == 50

    play(folder, script)


def test_calls_wait_for_a_detokenizer_that_is_being_restarted(folder):
    async def script(hub, sent):
        hub.lost(DETOKENIZER)
        task = await start(hub, call(text="a"))
        await asyncio.sleep(0.1)
        assert not sent and not task.done()
        hub.handle(Ready(DETOKENIZER, 1, {}))
        await asyncio.sleep(0.1)
        assert len(sent) == 1
        task.cancel()

    play(folder, script)


def test_draining(folder):
    async def script(hub, sent):
        tasks = [await start(hub, call(uids=[uid], text="a")) for uid in (1, 2)]
        drain = asyncio.ensure_future(hub.drain(0.2))
        await asyncio.sleep(0)
        assert (await collect(hub, call(uids=[3], text="a")))[0][0] == 503
        hub.handle(Pieces([piece(1, "done", "stop")]))
        assert (await tasks[0])[0].text == "done"
        await drain
        assert (await tasks[1])[0] == (503, "the server is shutting down")
        start_again = time.monotonic()
        await hub.drain(60)  # no call is left: no reason to wait
        assert time.monotonic() - start_again < 30

    play(folder, script)


def test_the_stand_in_tokenizer_serves_chats():
    to, message = Tokenizing(ByteTokenizer(), NoTextLimits()).handle(call(messages=chat("hi")))
    assert to == SCHEDULER and bytes(message.prompt_ids).decode() == "user: hi\nassistant: "
    assert isinstance(Tokenizing(ByteTokenizer(), NoTextLimits()).handle(call(text="a" * 101))[1], Failed)
    with pytest.raises(UserError):
        RequestParams(max_tokens=0)
