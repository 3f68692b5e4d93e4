"""What an attacker would try: code in data, requests that cost the server more than the client, names that are paths."""

import ast
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from common.config import UserError
from common.tokenizer import load_tokenizer
from stage9_server import client, launch, local_server
from stage9_server.cli import KEY_VARIABLE
from stage9_server.guard.connections import Patience
from stage9_server.guard.texts import MAX_BYTES, TextLimits
from stage9_server.messages import Failed, Tokenize
from stage9_server.openai_api import errors
from stage9_server.openai_api.requests import MAX_MESSAGES
from stage9_server.tokenizer_worker import Tokenizing
from tests.test_layout import ROOT, SOURCES
from tests.test_stage9_api import (
    CHAT,
    HELLO,
    TEXT,
    Exchange,
    FakeHub,
    app_of,
    connect,
    exchange,
    http_request,
    piece,
    post,
)

# --- data is never code -----------------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}  # by this very name: model.eval() is something else
METHODS = {
    *("torch.load", "os.system", "os.popen", "numpy.load", "np.load", "torch.hub.load", "yaml.load"),
    *("send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "scatter_object_list"),
}


def dangers(source: str) -> list[str]:
    """What in a source can turn data into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name in METHODS or name.rpartition(".")[2] in METHODS:
                found.append(name)
            found += [
                f"{keyword.arg}={ast.unparse(keyword.value)}"
                for keyword in node.keywords
                if (keyword.arg, ast.unparse(keyword.value)) in {("shell", "True"), ("weights_only", "False")}
                or (keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False")
            ]
    return found


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "x = torch.load(f)", "eval(a)", "exec(a)", "import yaml", "os.system(a)",
    "f(trust_remote_code=True)", "f(trust_remote_code=ask)", "run(c, shell=True)", "s.recv_pyobj()", "np.load(f)",
    "dist.broadcast_object_list(x)", "from cloudpickle.x import y",
])  # fmt: skip
def test_the_check_finds_what_it_looks_for(source):
    assert len(dangers(source)) == 1


def test_nothing_turns_data_into_code():
    assert dangers("model.eval()\nre.compile(x)\nf(trust_remote_code=False)\ntorch.compile(m)") == []
    assert {path: found for path, source in SOURCES.items() if (found := dangers(source))} == {}


def test_every_auto_class_is_told_not_to_trust():
    """`trust_remote_code=False` stands where a folder of somebody else's is read."""
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
                words = {keyword.arg for keyword in node.keywords}
                assert words & {"trust_remote_code", "gguf_file"}, f"{path}: {ast.unparse(node)}"


# --- chat templates, which are programs of whoever made the checkpoint ------------------------------------------


@pytest.fixture
def tokenizer(text_checkpoint):
    result = load_tokenizer(str(text_checkpoint.path))
    result.chat(HELLO)  # loads Jinja, which may take longer than the limits here
    return result


def ask(tokenizer, template: str | None = None, seconds: float = 5.0, **what):
    if template:
        tokenizer.hf.chat_template = template
    call = Tokenize([1], **({"messages": HELLO} | what))
    return Tokenizing(tokenizer, TextLimits(seconds)).handle(call)[1]


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__.os }}",
    "{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}",
])  # fmt: skip
def test_templates_are_in_a_sandbox(tokenizer, template):
    found = ask(tokenizer, template)
    assert isinstance(found, Failed) and found.status == 400
    assert "unsafe" in found.message or "undefined" in found.message, found.message


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x[1:] ~ 'b' %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}",
])  # fmt: skip
def test_a_template_bomb_is_over_in_time(tokenizer, template):
    found = ask(tokenizer, template, 1.0)
    assert isinstance(found, Failed) and found.status == 400


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is there on Linux")
def test_a_template_that_fills_the_memory(text_checkpoint):
    """In a process of its own, which gets the limit that the worker has, only less."""
    script = f"""
from common.tokenizer import load_tokenizer
from stage9_server.guard.texts import TextLimits, limit_memory
from stage9_server.tokenizer_worker import Tokenizing
from stage9_server.messages import Tokenize
tokenizer = load_tokenizer({str(text_checkpoint.path)!r})
limit_memory(512 << 20)
call = Tokenize([1], messages=[{{"role": "user", "content": "hi"}}])
tokenizer.hf.chat_template, good = "{{{{ 'a' * 10 ** 10 }}}}", tokenizer.hf.chat_template
print(Tokenizing(tokenizer, TextLimits()).handle(call)[1].message)
tokenizer.hf.chat_template = good
print(type(Tokenizing(tokenizer, TextLimits()).handle(call)[1]).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["the input can't be tokenized: MemoryError", "Tokenized"], done.stderr


@pytest.mark.parametrize("what", [
    {"messages": None, "text": "a" * (MAX_BYTES + 1)},
    {"messages": [{"role": "user", "content": "é" * (MAX_BYTES // 2 + 1)}]},
    {"messages": [{"role": "user", "content": "hi", "name": "n" * MAX_BYTES}]},
    {"messages": [{"role": "user", "content": "a" * (MAX_BYTES // 2)}] * 3},
])  # fmt: skip
def test_texts_that_would_take_the_tokenizer_minutes(tokenizer, monkeypatch, what):
    for method in ("encode", "chat"):
        monkeypatch.setattr(tokenizer, method, lambda *_, **__: pytest.fail("has been asked"))
    found = ask(tokenizer, **what)
    assert (found.status, "send less" in found.message) == (400, True)


# --- requests that are cheap to send ----------------------------------------------------------------------------

SIZE = 2 << 20  # bytes of a body


def many(start: str, item: str, end: str) -> bytes:
    return (start + ",".join([item] * (SIZE // (len(item) + 1))) + end).encode()


def object_of(key: str, value: str) -> str:
    return "{" + ",".join(f'"{key}{i}":{value}' for i in range(SIZE // (len(key + value) + 10))) + "}"


FLOODS = {
    "messages": (CHAT, many('{"model":"m","messages":[', '{"role":"user","content":""}', "]}"), "messages"),
    "bad messages": (CHAT, many('{"model":"m","messages":[', "5", "]}"), "messages"),
    "parts": (CHAT, many('{"model":"m","messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"), "messages.0.content"),
    "unknown fields": (CHAT, ('{"model":"m","messages":[{"role":"user","content":""}],' + object_of("k", "1")[1:]).encode(), "k0"),
    "unknown in a message": (CHAT, ('{"model":"m","messages":[' + object_of("k", "1") + "]}").encode(), "k0"),
    "unknown in options": (TEXT, ('{"model":"m","prompt":"x","stream":true,"stream_options":' + object_of("k", "1") + "}").encode(), "k0"),
    "logit_bias": (TEXT, ('{"model":"m","prompt":"x","logit_bias":' + object_of("", "1") + "}").encode(), "logit_bias"),
    "bad logit_bias": (TEXT, ('{"model":"m","prompt":"x","logit_bias":' + object_of("k", "1e9") + "}").encode(), "logit_bias"),
    "stop": (TEXT, many('{"model":"m","prompt":"x","stop":[', '"a"', "]}"), "stop"),
    "stop_token_ids": (TEXT, many('{"model":"m","prompt":"x","stop_token_ids":[', "1", "]}"), "stop_token_ids"),
    "prompts": (TEXT, many('{"model":"m","prompt":[', '"a"', "]}"), "prompt"),
    "prompts of ids": (TEXT, many('{"model":"m","prompt":[', "[1]", "]}"), "prompt"),
    "a long key": (TEXT, ('{"model":"m","prompt":"x","' + "k" * SIZE + '":1}').encode(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_in_a_field_is_refused_before_it_is_looked_at(name, monkeypatch):
    """Nothing of pydantic's runs for each of a hundred thousand items: there is one event loop for all clients."""
    path, body, param = FLOODS[name]
    seen, hub = [], FakeHub([piece("a", reason="stop")])
    from_validation = errors.from_validation
    monkeypatch.setattr(errors, "from_validation", lambda found: seen.append(len(found)) or from_validation(found))
    found = exchange(hub, [body], path)
    if param is None:  # ignored
        assert (found.status, len(hub.calls)) == (200, 1)
        return
    assert (found.status, hub.calls) == (400, []) and found.error["param"].startswith(param)
    assert not seen or seen[0] <= 4
    assert len(found.body) < 1000


@pytest.mark.parametrize(("path", "fields"), [
    (TEXT, {"n": 10**6}), (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 10**6}), (TEXT, {"logprobs": 10**6}),
    (TEXT, {"best_of": 10**6}), (TEXT, {"max_tokens": 10**12}), (TEXT, {"prompt": ["x"] * 256, "n": 2}),
    (TEXT, {"stop": ["x" * 10**5]}), (TEXT, {"cache_salt": "x" * 10**5}), (CHAT, {"messages": HELLO * (MAX_MESSAGES + 1)}),
])  # fmt: skip
def test_huge_numbers_never_reach_the_hub(path, fields):
    hub = FakeHub([piece("a", reason="stop")])
    body = {"model": "m"} | fields if path == CHAT else fields
    found = exchange(hub, json.dumps(body).encode() if path == CHAT else body, path)
    assert (found.status, hub.calls) == (400, [])


def test_counting_tokens_has_its_share_of_the_limit():
    """Otherwise it would be the way round it."""

    async def beside_a_completion(path: str, body: bytes) -> Exchange:
        app = app_of(FakeHub(0.2, [piece("a", reason="stop")]), max_concurrent=1)
        completion = asyncio.ensure_future(Exchange(TEXT, {"model": "m", "prompt": "x"})(app))
        await asyncio.sleep(0.05)
        found = await Exchange(path, body)(app)
        assert (await completion).status == 200
        return found

    for path, body in (("/tokenize", b'{"prompt": "x"}'), ("/detokenize", b'{"tokens": [1]}')):
        found = asyncio.run(beside_a_completion(path, body))
        assert (found.status, found.error["code"]) == (429, "rate_limit_exceeded")


# --- a real server ----------------------------------------------------------------------------------------------

CLIENT_SECONDS = 1.5


@pytest.fixture(scope="module")
def temp():
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # pytest's own paths are too long for a socket
    yield folder
    folder.rmdir()


@pytest.fixture(scope="module")
def server(text_checkpoint, temp):
    flags = ("--device=cpu", "--dtype=float32", "--port=0", f"--client-seconds={CLIENT_SECONDS}", "--api-key=sesame")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temp))
        with local_server.running("--model", str(text_checkpoint.path), *flags) as running:
            yield running


def get(url: str, raw_path: str, key: str = "sesame") -> tuple[int, bytes]:
    """A request with exactly this path, which ordinary clients would tidy up."""
    with connect(url) as sock:
        head = f"GET {raw_path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    return int(data.split()[1]), data


@pytest.mark.parametrize("path", [
    "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/../../../etc/passwd", "/etc/passwd",
    "/v1/models//etc/passwd", "//etc/passwd", "/v1/models/%00", "/health/../etc/passwd",
])  # fmt: skip
def test_no_path_leads_out(server, path):
    status, data = get(server.url, path)
    assert status in (400, 404) and b"root:" not in data


@pytest.mark.parametrize(
    "path", ["/v1/models", "/openapi.json", "/health/../v1/models", "/metrics/x", "//health", "/%2e/health"]
)
def test_no_way_round_the_key(server, path):
    status, data = get(server.url, path, "wrong")
    assert status == 401 and b"www-authenticate: bearer" in data.lower()


def test_a_model_is_a_name_and_no_path(server, text_checkpoint):
    key = {"Authorization": "Bearer sesame"}
    for model in ("/etc/passwd", "../model", f"{text_checkpoint.path}/", f"{text_checkpoint.path}/../model"):
        status, _, answer = post(server.url, TEXT, {"model": model, "prompt": "x"}, **key)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_only_the_user_can_enter_where_the_processes_talk(server, temp):
    (folder,) = temp.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()
    assert {path.name for path in folder.iterdir()} >= {"api", "scheduler", "detokenizer", "tokenizer-0"}


def test_a_browser_is_told_nothing_about_other_origins(server):
    """No CORS header: a foreign page can't read an answer, nor send JSON."""
    with connect(server.url) as sock:
        sock.sendall(
            f"OPTIONS {TEXT} HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\nAccess-Control-Request-Method: POST\r\n"
            "Access-Control-Request-Headers: content-type\r\nConnection: close\r\n\r\n".encode()
        )
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert not data.startswith(b"HTTP/1.1 2") and b"access-control" not in data.lower()


def closed(sock: socket.socket, seconds: float) -> bool:
    """Does the other side close it in this time?"""
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


REQUEST = http_request(TEXT, {"model": "m", "prompt": "x"})


@pytest.mark.parametrize("start", [b"", b"POST /v1", REQUEST[:-10]], ids=["nothing", "half a head", "half a body"])
def test_who_begins_and_does_not_go_on_is_shut_out(server, start):
    with connect(server.url) as sock:
        sock.sendall(start)
        assert closed(sock, 20)


@pytest.mark.parametrize("part", ["head", "body"])
def test_byte_by_byte(server, part):
    """A byte now and then is no excuse; and the others don't notice."""
    head = REQUEST.index(b"\r\n\r\n") + 4
    with connect(server.url) as sock:
        sock.sendall(REQUEST[: 10 if part == "head" else head])
        end = time.monotonic() + 20
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            while time.monotonic() < end:
                sock.sendall(b"x" if part == "head" else b" ")
                assert get(server.url, "/health")[0] == 200
                time.sleep(0.1)


def test_a_head_without_end(server):
    with connect(server.url) as sock, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(100):
            sock.sendall(b"x" * 65536)
            time.sleep(0.01)


def test_who_waits_for_the_engine_is_not_shut_out(server, text_checkpoint):
    body = {"model": str(text_checkpoint.path), "prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 16}
    status, _, answer = post(server.url, TEXT, body, Authorization="Bearer sesame")
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8000)


def test_who_does_not_read_is_shut_out_and_his_sequences_end(server, text_checkpoint):
    body = {"model": str(text_checkpoint.path), "prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 16}
    body |= {"stream": True, "logprobs": 20}
    request = http_request(TEXT, body).replace(b"Host: localhost", b"Host: localhost\r\nAuthorization: Bearer sesame")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        sock.sendall(request)
        end = time.monotonic() + 60
        while local_server.metrics(server.url)["sglang:sequences_in_flight"] == 0:
            assert time.monotonic() < end
        while local_server.metrics(server.url)["sglang:sequences_in_flight"]:
            assert time.monotonic() < end
            time.sleep(0.1)
        received = b"".join(iter(lambda: until_reset(sock), b""))
    assert b"[DONE]" not in received


def until_reset(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


class Client:
    """A connection as Patience sees it."""

    def __init__(self, cycle=None):
        self.cycle, self.closed, self.unread = cycle, False, 0
        self.flow = type("Flow", (), {"write_paused": False})()
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.closed = True


class Cycle:
    response_complete = more_body = False


def test_where_there_are_too_many_the_most_idle_ones_go():
    patience = Patience(60, 3)
    old, busy, young = Client(), Client(Cycle()), [Client() for _ in range(3)]
    patience.look([old, busy])
    patience.look([old, busy, *young])
    assert [client.closed for client in (old, busy, *young)] == [True, False, True, False, False]


def test_a_slow_reader_who_reads_may_stay():
    patience, client = Patience(0, 10), Client(Cycle())
    client.flow.write_paused = True
    for client.unread in (100, 50, 20):
        patience.look([client])
        assert not client.closed
    patience.look([client])
    assert client.closed


@pytest.mark.parametrize(("flags", "variable"), [(["--api-key", ""], "key"), ([], "")])
def test_an_empty_key_is_no_key(flags, variable, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", *flags, "--port", "0"])
    monkeypatch.setenv(KEY_VARIABLE, variable)
    monkeypatch.setattr(launch, "serve", None)  # which nobody gets to
    with pytest.raises(UserError, match="let every client in"):
        launch.main()


@pytest.mark.parametrize(("flags", "key"), [(["--api-key", "ours"], "ours"), ([], "theirs")])
def test_where_the_key_comes_from(flags, key, monkeypatch):
    """And it is not passed on to the workers."""
    found = []

    async def serve(args, folder, sock):
        found.append((args.api_key, KEY_VARIABLE in os.environ))

    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.setattr(launch.cli, "leave", lambda status: None)
    monkeypatch.setattr(sys, "argv", ["launch", *flags, "--port", "0"])
    monkeypatch.setenv(KEY_VARIABLE, "theirs")
    launch.main()
    assert found == [(key, False)]


def test_the_client_gives_the_key_of_the_environment(server, monkeypatch, capsys):
    words = f"client bench --url {server.url} --scale 0.02 --requests 1".split()
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match="give the server's key"):
        client.main()
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    client.main()
    assert "1 requests" in capsys.readouterr().out


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Whatever the key is, it is hmac that looks at it."""
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda *pair: compared.append(pair) or False)
    for key in (b"Bearer s", b"Bearer sesame", b""):
        found = exchange(FakeHub(), {}, settings={"api_key": "sesame"}, headers=[(b"authorization", key)])
        assert found.status == 401
    assert compared == [(key, b"sesame") for key in (b"s", b"sesame", b"")]
