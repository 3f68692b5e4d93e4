"""The HTTP side: checks requests, hands them to the hub, and turns the pieces that come back into OpenAI's answers.

Owns nothing but counts. A call's sequences belong to the hub, and leaving `hub.stream` early, for whatever reason,
has them aborted: that is all there is to a client that goes away.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config import UserError
from stage9_server.hub import Hub, RequestFailed
from stage9_server.messages import Tokenize
from stage9_server.metrics import Metrics
from stage9_server.openapi import document
from stage9_server.protocol import (
    Answer,
    ApiError,
    ChatForm,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Form,
    TextForm,
    TokenizeRequest,
    encode,
    parse,
)

ROUTES = {
    "/v1/chat/completions": ("POST", "chat_completions"),
    "/v1/completions": ("POST", "completions"),
    "/v1/models": ("GET", "models"),
    "/v1/models/{model:path}": ("GET", "model"),
    "/tokenize": ("POST", "tokenize"),
    "/detokenize": ("POST", "detokenize"),
    "/health": ("GET", "health"),
    "/metrics": ("GET", "metrics_text"),
    "/openapi.json": ("GET", "openapi"),
}
PATHS = {name: path for path, (_, name) in ROUTES.items()}
NO_KEY = ("give the server's key, in the header Authorization: Bearer KEY", None, "invalid_api_key")
OPEN = ("/health", "/metrics")  # need no key
HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}  # seconds
OTHERS = "to be called by another, it needs --api-key, or --host with an address that others may reach"
LOGPROBS = "log-probabilities (sequences x tokens x (likeliest ones + 1))"
BODIES = 64  # requests of the largest size that are in memory at the same time
CLIENT_LEFT = 499  # nginx's number for it; only the metrics show it


@dataclass
class ApiSettings:
    model: str  # the name under which it is served
    api_key: str | None = None
    max_concurrent: int = 1024  # sequences in flight
    max_logprobs: int = 1 << 20  # log-probabilities in answers under way, some 300 bytes each
    max_body_bytes: int = 4 << 20
    hosts: tuple[str, ...] = ()  # names that clients may know it by; empty: any (see DNS rebinding)


SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
B = TypeVar("B", bound=BaseModel)
Kind = type[ChatRequest] | type[CompletionRequest]


def create_app(hub: Hub, settings: ApiSettings) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # the document is ours, and has no pages
    metrics = Metrics(lambda: hub.stats)
    api = Api(hub, settings, metrics)
    for path, (method, name) in ROUTES.items():  # plain ones: the checks are ours, and FastAPI's cost 0.3 ms a call
        app.add_route(path, getattr(api, name), [method])
    for kind in (ApiError, UserError, RequestFailed, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    return app


class Api:
    def __init__(self, hub: Hub, settings: ApiSettings, metrics: Metrics):
        self.hub, self.settings, self.metrics = hub, settings, metrics
        self.started_at = int(time.time())
        self.logprobs = 0  # that answers under way may have, at the most

    # --- endpoints ---

    async def chat_completions(self, request: Request) -> Response:
        return await self.generate(request, ChatRequest, ChatForm)

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, CompletionRequest, TextForm)

    async def models(self, _request: Request) -> Response:
        return reply({"object": "list", "data": [self.card()]})

    async def model(self, request: Request) -> Response:
        if not (name := request.path_params["model"]):  # /v1/models/
            return await self.models(request)
        self.check_model(name)
        return reply(self.card())

    async def tokenize(self, request: Request) -> Response:
        ask = await self.read(request, TokenizeRequest)
        messages = ask.messages and [message.for_template() for message in ask.messages]
        call = Tokenize(self.hub.new_uids(1), text=ask.prompt, messages=messages, special=ask.add_special_tokens)
        with self.admitted(1):
            tokens = await self.hub.tokenize(call)
        return reply({"tokens": tokens, "count": len(tokens), "max_model_len": self.hub.info["max_len"]})

    async def detokenize(self, request: Request) -> Response:
        ask = await self.read(request, DetokenizeRequest)
        with self.admitted(1):
            return reply({"text": await self.hub.detokenize(ask.tokens)})

    async def health(self, _request: Request) -> Response:
        if reason := self.hub.health():
            raise ApiError(503, reason)
        return reply({"status": "ok"})

    async def metrics_text(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        return reply(document("SGLang from zero", self.settings.model))

    # --- what they share ---

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Room for so many sequences, or ApiError."""
        metrics, limit = self.metrics, self.settings.max_concurrent
        check_room("sequences", size, limit, metrics.in_flight, limit)
        metrics.in_flight += size
        try:
            yield
        finally:
            metrics.in_flight -= size

    @contextmanager
    def remembered(self, size: int) -> Iterator[None]:
        """Room for so many log-probabilities, or ApiError."""
        limit = self.settings.max_logprobs
        check_room(LOGPROBS, size, limit // 4, self.logprobs, limit)
        self.logprobs += size
        try:
            yield
        finally:
            self.logprobs -= size

    async def read(self, request: Request, kind: type[B]) -> B:
        """The request in the body. Only as JSON: a browser must ask us before a foreign page may send that."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        ask = parse(kind, await request.body())
        if ask.model is not None:
            self.check_model(ask.model)
        return ask

    def check_model(self, model: str) -> None:
        if model != self.settings.model:
            message = f"the model {model[:100]!r} does not exist; this server has {self.settings.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def card(self) -> dict:
        return {
            "id": self.settings.model,
            "object": "model",
            "created": self.started_at,
            "owned_by": "sglang-from-zero",
            "max_model_len": self.hub.info["max_len"],
            "vocab_size": self.hub.info["vocab_size"],
        }

    async def generate(self, request: Request, kind: Kind, form: Form) -> Response:
        start = time.perf_counter()
        ask = await self.read(request, kind)
        uids = self.hub.new_uids(ask.num_sequences)
        options = {"logprobs": ask.num_likeliest is not None, "include_usage": ask.include_usage}
        answer = Answer(form, self.settings.model, uids, ask.n, **options)
        updates = self.updates(ask.calls(uids), answer, start)
        room = self.remembered(ask.num_logprobs(self.hub.info["max_len"]))
        return (EventStream if ask.stream else WholeAnswer)(answer, updates, room)

    async def updates(self, calls: list[Tokenize], answer: Answer, start: float) -> AsyncGenerator[Iterable[int]]:
        """Brings the answer up to date until it is complete; each time, the uids that have something new."""
        told_at = dict.fromkeys(answer.choices)
        with self.admitted(len(answer.choices)):
            try:
                async with aclosing(self.hub.stream(calls)) as stream:
                    async for pieces in stream:
                        answer.add(pieces)
                        self.metrics.count(pieces, told_at, start)
                        yield dict.fromkeys(piece.uid for piece in pieces)
            finally:
                self.metrics.count_prompts(answer.usage())


def check_room(what: str, size: int, most: int, under_way: int, limit: int) -> None:
    """ApiError if one call is too large, or for now one too many."""
    if size > most:
        raise ApiError(400, f"the call has {size} {what}; at most {most} fit in here")
    if under_way + size > limit:
        message = f"{under_way} of {limit} {what} are under way, and the call has {size}; try again later"
        raise ApiError(429, message, code="rate_limit_exceeded")


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Wait for the work. If the client leaves first, the work is cancelled: ClientDisconnect."""

    async def gone():
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if tasks[0].cancelled():
        raise ClientDisconnect
    tasks[0].result()  # raises what went wrong


class Delivery(Response):
    """Generates an answer and sends it. Until its status has gone out, an error has a status of its own.

    Owns the updates, and closes them. Keeps the room for log-probabilities until the client has read the answer.
    """

    def __init__(self, answer: Answer, updates: AsyncGenerator[Iterable[int]], room: AbstractContextManager):
        super().__init__()
        self.answer, self.updates, self.room, self.started = answer, updates, room, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.room:
            async with aclosing(self.updates):
                try:
                    await unless_gone(receive, self.deliver(send))
                except ClientDisconnect:
                    if not self.started:
                        raise

    async def start(self, send: Send, headers: dict[str, str]) -> None:
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


class WholeAnswer(Delivery):
    """One JSON object, once all of it is there."""

    async def deliver(self, send: Send) -> None:
        async for _ in self.updates:
            pass
        body = await self.answer.whole()
        await self.start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # waits until the client has read the rest


class EventStream(Delivery):
    """Server-sent events, once the engine has taken all of the call: what is there, then every update as it comes."""

    async def deliver(self, send: Send) -> None:
        async def send_events(uids: Iterable[int]) -> None:
            events = self.answer.events(uids)
            if not self.answer.num_open:
                events += self.answer.ending()
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})

        while not self.answer.accepted:
            await anext(self.updates)
        await self.start(send, SSE_HEADERS)
        last = b""
        try:
            await send_events(self.answer.choices)
            async for uids in self.updates:
                await send_events(uids)
        except RequestFailed as error:
            last = b"data: " + ApiError(error.status, error.message).body() + b"\n\n"
        await send({"type": "http.response.body", "body": last})


class Gate:
    """Before all routes: the key, the name of the host, the size of the body, and a count of what was answered."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, metrics: Metrics):
        self.app, self.settings, self.metrics = app, settings, metrics
        self.key = settings.api_key and settings.api_key.encode()
        self.body_bytes = 0  # of requests that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit, size, kept, status = self.settings.max_body_bytes, 0, 0, None

        async def limited() -> Message:
            nonlocal size, kept
            message = await receive()
            new = len(message.get("body", b""))
            size += new
            if size > limit:
                refusal = ApiError(413, f"the body has more than {limit} bytes; send less")
            elif self.body_bytes + new > BODIES * limit:
                busy = f"{self.body_bytes} of {BODIES * limit} bytes of requests are in memory; try again later"
                refusal = ApiError(429, busy, code="rate_limit_exceeded")
            else:
                self.body_bytes, kept = self.body_bytes + new, size
                return message
            while message.get("more_body") and size < 8 * limit:
                message = await receive()  # a client reads no answer before it has sent its body: take a limited rest
                size += len(message.get("body", b""))
            raise refusal

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refusal = self.refusal(scope)
        try:
            return await (error_response(refusal) if refusal else self.app)(scope, limited, counted)
        finally:  # the answer to an unforeseen error is given further out
            self.body_bytes -= kept
            name = getattr(scope.get("endpoint"), "__name__", None)  # a refused request has none
            route = scope["path"] if scope["path"] in ROUTES else PATHS.get(name, "other")
            self.metrics.requests[route, status or 500] += 1

    def refusal(self, scope: Scope) -> ApiError | None:
        """A request without the key is refused. Without a key, one whose Host header is not an address of this machine: it comes
        from a web page whose domain was pointed here (DNS rebinding)."""
        headers, hosts = dict(scope["headers"]), self.settings.hosts
        if scope["path"] in OPEN:
            return None
        if self.key:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            known = hmac.compare_digest(key.lstrip(b" "), self.key) and scheme.lower() == b"bearer"
            return None if known else ApiError(401, *NO_KEY)
        known = not hosts or host_name(headers.get(b"host", b"")) in hosts
        return None if known else ApiError(403, f"this server goes by the name of {' or '.join(hosts)} only; {OTHERS}")


def host_name(header: bytes) -> str | None:
    with suppress(ValueError):
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    return None


def reply(content: dict) -> Response:
    return json_response(encode(content))


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def on_error(_request: Request, error: Exception) -> Response:
    """Without `async` it would run in a thread."""
    return error_response(error)


def error_response(error: Exception) -> Response:
    """Every error in OpenAI's form."""
    headers = dict(getattr(error, "headers", None) or {})  # a 405 says what is allowed
    match error:
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case ApiError():
            pass
        case RequestFailed():
            error = ApiError(error.status, error.message)
        case UserError():
            error = ApiError(400, str(error))
        case HTTPException():
            allowed = headers.get("Allow")
            way_out = f"use {allowed}" if allowed else f"there are {', '.join(ROUTES)}"
            error = ApiError(error.status_code, f"{error.detail}: {way_out}")
        case _:
            error = ApiError(500, "internal error; the server's log has the details")
    headers |= HEADERS.get(error.status, {})
    return Response(error.body(), error.status, headers, "application/json")
