"""The load generator and the benchmark client, against servers that are not ours: a socket that sends what a test scripts."""

import asyncio
import json
import socket
import threading

import pytest

from common.config import UserError
from stage9_server import client, load

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def text(piece: str) -> bytes:
    return json.dumps({"choices": [{"text": piece, "finish_reason": None}]}).encode()


class Scripted:
    """Answers every connection with what `answer` returns for its path, and closes it."""

    def __init__(self, answer):
        self.answer, self.paths = answer, []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.sock.accept()
            except OSError:  # closed: the test is over
                return
            with connection, connection.makefile("rb") as request:
                self.paths.append(request.readline().split()[1].decode())
                length = 0
                while line := request.readline().strip():
                    name, _, value = line.lower().partition(b":")
                    length = int(value) if name == b"content-length" else length
                request.read(length)
                connection.sendall(self.answer(self.paths[-1]))


@pytest.fixture
def serve():
    servers = []

    def start(answer) -> Scripted:
        servers.append(Scripted(answer if callable(answer) else lambda path: answer))
        return servers[-1]

    yield start
    for server in servers:
        server.sock.shutdown(socket.SHUT_RDWR)
        server.sock.close()


def ask(url: str) -> load.Reply:
    (reply,) = asyncio.run(load.offer(load.Server(url), "/v1/completions", [{}]))
    return reply


# --- answers ----------------------------------------------------------------------------------------------------

EVENTS = [b"data: " + text("one"), b"data: " + text("two"), b"data: [DONE]"]


@pytest.mark.parametrize("lines", [
    [b": keep-alive", b"", *(line for event in EVENTS for line in (event, b""))],
    [b": keep-alive", *(line for event in EVENTS for line in (b"event: message", b"id: 7", event, b": more", b""))],
    [line for event in EVENTS for line in (event.replace(b"data: ", b"data:"), b"")],
], ids=["comment", "fields", "no-space"])  # fmt: skip
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_every_form_of_an_event_stream(lines, end, serve):
    reply = ask(serve(HEAD + b"".join(line + end for line in lines)).url)
    assert (reply.error, reply.text, len(reply.arrivals)) == (None, "onetwo", 2)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\r\n\r\n", b"\xff" * 5000, b"220 200 ready\r\n\r\n"])
def test_an_answer_that_is_not_http(answer, serve):
    reply = ask(serve(answer).url)
    assert reply.error and len(reply.error) < 700
    assert answer.strip()[:20].decode(errors="replace") in reply.error


@pytest.mark.parametrize(
    "event", [b"{", b"7", b"null", b'{"choices": 7}', b'{"choices": [[]]}', b'{"usage": {}}', b"{}"]
)
def test_an_event_that_is_none(event, serve):
    reply = ask(serve(HEAD + b"data: " + text("one") + b"\n\ndata: " + event + b"\n\ndata: [DONE]\n\n").url)
    assert (reply.error, reply.text) == (f"no event of OpenAI's: {event.decode()}", "one")


# --- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://h:abc", "http://[::1", "ftp://h", "ftp://h:80", "127.0.0.1:8000", "http://", ""]
)
def test_an_address_that_is_none(url):
    with pytest.raises(UserError, match="give one like http"):
        load.Server(url)


@pytest.mark.parametrize(("url", "host", "port"), [
    ("http://h", "h", 80), ("https://h", "h", 443), ("https://h:8443/x", "h", 8443), ("http://[::1]:9", "::1", 9),
])  # fmt: skip
def test_where_an_address_leads(url, host, port):
    server = load.Server(url)
    assert (server.host, server.port, server.tls is not None) == (host, port, url.startswith("https"))


# --- bench ------------------------------------------------------------------------------------------------------


def api(path: str) -> bytes:
    """A server of one model; its streams are one token long."""
    if path.endswith("/models"):
        content = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + content
    usage = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
    return HEAD + b"".join(b"data: %b\n\n" % data for data in (text("one"), usage, b"[DONE]"))


def bench(url: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(client, "__file__", str(tmp_path / "client.py"))
    monkeypatch.setattr("sys.argv", f"client bench --url {url} --scale 0.02 --requests 3 --save".split())
    client.main()


@pytest.mark.parametrize("path", ["", "/", "/prefix", "/a/prefix/"])
def test_the_urls_path_comes_first(path, serve, monkeypatch, tmp_path):
    server = serve(api)
    bench(server.url + path, monkeypatch, tmp_path)
    base = path.rstrip("/")
    assert server.paths == [f"{base}/v1/models", *[f"{base}/v1/completions"] * 3]
    assert len(list((tmp_path / "results").glob("*.json"))) == 1


def test_a_benchmark_without_an_answer_leaves_no_record(serve, monkeypatch, tmp_path):
    server = serve(lambda path: api(path) if path.endswith("/models") else b"HTTP/1.1 503 Busy\r\n\r\nlater")
    with pytest.raises(UserError, match=r"none of the 3 requests was answered: HTTP/1\.1 503 Busy: later"):
        bench(server.url, monkeypatch, tmp_path)
    assert len(server.paths) == 4
    assert not (tmp_path / "results").exists()
