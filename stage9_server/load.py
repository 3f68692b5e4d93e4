"""Many requests at a server, and how long each token took. Works with any OpenAI-compatible server.

The clients must not be what is measured. So a request is a bare connection that notes when which bytes came, and
nothing looks into them before all are done.
"""

import asyncio
import re
import ssl
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from common import workload
from common.config import UserError

T = TypeVar("T")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COLUMNS = ["ms", "mean", "p50", "p90", "p99"]


@dataclass
class Reply:
    """What became of one request. Times are time.perf_counter's."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)  # of events with text
    done_at: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None  # why the answer is not whole

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.done_at - self.sent_at

    @property
    def tpot(self) -> float:
        """Mean time of an output token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between two events with text, as the reader sees it (inter-token latency)."""
        return np.diff(self.arrivals).tolist()


class Exchange(asyncio.Protocol):
    """One request on a connection of its own: the answer's bytes, and when they came."""

    def __init__(self, request: bytes):
        self.request, self.data, self.offsets, self.times = request, bytearray(), [], []
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.offsets.append(len(self.data))
        self.times.append(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)

    def parts(self, start: int, chunked: bool) -> Iterator[tuple[bytes, float]]:
        """The body from offset `start`, in parts, and when each was complete."""
        while chunked and (end := self.data.find(b"\r\n", start)) >= 0:
            size = int(self.data[start:end], 16)
            start = end + 2 + size + 2
            if not size or start > len(self.data):
                return
            yield bytes(self.data[end + 2 : start - 2]), self.times[bisect_left(self.offsets, start - 2)]
        if not chunked:
            for offset, at in zip(self.offsets, self.times, strict=True):
                if offset > start:
                    yield bytes(self.data[start:offset]), at
                    start = offset


class Server:
    """Where the requests go: all paths are below the URL's."""

    def __init__(self, url: str, api_key: str | None = None):
        try:
            parts = urlsplit(url)
            usual_port, port = {"http": 80, "https": 443}.get(parts.scheme), parts.port
        except ValueError:  # of a port that can't be, or a bracket that stays open
            usual_port = None
        if not usual_port or not parts.hostname:
            raise UserError(f"the address {url!r} is none; give one like http://127.0.0.1:8000")
        self.host, self.port, self.base = parts.hostname, port or usual_port, parts.path.rstrip("/")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        if api_key:
            self.headers += f"Authorization: Bearer {api_key}\r\n"

    async def exchange(self, path: str, body: dict) -> tuple[float, Exchange | OSError]:
        """Send, and wait for the end; when it was sent, and what came of it."""
        content = msgspec.json.encode(body)
        head = f"POST {self.base}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(content)}\r\n\r\n"
        sent_at = time.perf_counter()
        try:
            connect = asyncio.get_running_loop().create_connection(
                lambda: Exchange(head.encode() + content), self.host, self.port, ssl=self.tls
            )
            transport, exchange = await connect
            try:
                await exchange.closed
            finally:
                transport.close()
        except OSError as error:
            return sent_at, error
        return sent_at, exchange


async def offer(server: Server, path: str, bodies: list[dict], **when) -> list[Reply]:
    """Send all bodies, as streams; `when` as in `spread`. The replies are read when all of them are here."""
    jobs = [partial(server.exchange, path, body | STREAM) for body in bodies]
    return [read_reply(*pair) for pair in await spread(jobs, **when)]


async def converse(server: Server, body: dict, conversations: list[list[dict]], **when) -> list[Reply]:
    """Hold conversations: lists of {"content": what the user says, and more of the body}. `when` as in `spread`."""

    async def hold(turns: list[dict]) -> list[Reply]:
        messages, replies = [], []
        for turn in turns:
            messages.append({"role": "user", "content": turn["content"]})
            more = {name: value for name, value in turn.items() if name != "content"} | {"messages": messages}
            replies.append(read_reply(*await server.exchange("/v1/chat/completions", body | more | STREAM)))
            messages.append({"role": "assistant", "content": replies[-1].text})
        return replies

    held = await spread([partial(hold, turns) for turns in conversations], **when)
    return [reply for replies in held for reply in replies]


async def spread(
    jobs: list[Callable[[], Awaitable[T]]], concurrency: int | None = None, rate: float | None = None
) -> list[T]:
    """Run all jobs: at most `concurrency` at once, or `rate` per second (Poisson), or all now."""
    slots = asyncio.Semaphore(concurrency or len(jobs))

    async def one(job: Callable[[], Awaitable[T]], delay: float) -> T:
        await asyncio.sleep(delay)
        async with slots:
            return await job()

    delays = workload.online(len(jobs), rate) if rate else [0.0] * len(jobs)
    return await asyncio.gather(*map(one, jobs, delays))


def read_reply(sent_at: float, exchange: Exchange | OSError) -> Reply:
    """Look at what came: the head, then line by line (an event of these servers has one line of data)."""
    reply = Reply(sent_at)
    if isinstance(exchange, OSError) or not exchange.data:
        reply.error = str(exchange) if isinstance(exchange, OSError) else "the connection was closed without an answer"
        return reply
    reply.done_at = exchange.times[-1]
    head, _, body = bytes(exchange.data).partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] 200\b", head):
        status, _, _ = head.partition(b"\r\n")
        reply.error = f"{status[:300].decode(errors='replace')}: {body[:300].decode(errors='replace')}"
        return reply
    rest, texts, whole, content = b"", [], False, b""
    try:
        for part, at in exchange.parts(len(head) + 4, b"transfer-encoding: chunked" in head.lower()):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):  # a comment, another field, or the end of an event
                    continue
                content = line[5:].strip()
                if content == b"[DONE]":
                    whole = True
                elif text := read_event(reply, msgspec.json.decode(content)):
                    reply.arrivals.append(at)
                    texts.append(text)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError):
        reply.error = f"no event of OpenAI's: {content[:300].decode(errors='replace')}"
    reply.text = "".join(texts)
    if not whole and not reply.error:
        reply.error = "the stream broke off"
    return reply


def read_event(reply: Reply, event: dict) -> str:
    """The text in an event; notes what else it says."""
    if "error" in event:
        reply.error = event["error"]["message"]
        return ""
    if usage := event.get("usage"):
        reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = ""
    for choice in event["choices"]:
        text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    return text


@dataclass(frozen=True)
class Summary:
    """Of many replies. Latencies in seconds."""

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    latencies: dict[str, list[float]]  # TTFT, ITL, TPOT, E2E
    good: int  # requests within the limits

    @property
    def rows(self) -> list[list]:
        """For a table with COLUMNS."""
        return [
            [name, *milliseconds([np.mean(values), *np.percentile(values, (50, 90, 99))])]
            for name, values in self.latencies.items()
            if values
        ]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


def milliseconds(seconds: Iterable[float]) -> list[float]:
    """For a table."""
    return [round(1e3 * float(x), 2) for x in seconds]


def summarize(replies: list[Reply], ttft_limit: float = np.inf, itl_limit: float = np.inf) -> Summary:
    """The limits, in seconds, are on a request's TTFT and on its mean time an output token."""
    whole = [reply for reply in replies if not reply.error]
    told = [reply for reply in whole if reply.arrivals]
    latencies = {
        "TTFT": [reply.ttft for reply in told],
        "ITL": [gap for reply in told for gap in reply.gaps],
        "TPOT": [reply.tpot for reply in told if reply.output_tokens > 1],
        "E2E": [reply.e2e for reply in whole],
    }
    return Summary(
        requests=len(replies),
        failed=len(replies) - len(whole),
        seconds=max((r.done_at for r in whole), default=0) - min((r.sent_at for r in replies), default=0),
        prompt_tokens=sum(reply.prompt_tokens for reply in whole),
        cached_tokens=sum(reply.cached_tokens for reply in whole),
        output_tokens=sum(reply.output_tokens for reply in whole),
        latencies=latencies,
        good=sum(reply.ttft <= ttft_limit and reply.tpot <= itl_limit for reply in told),
    )
