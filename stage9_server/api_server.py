"""The HTTP side: checks requests, hands them to the hub, and turns the pieces that come back into OpenAI's answers.

Owns nothing but counts. A call's sequences belong to the hub, and whoever leaves `hub.stream` early, for whatever reason,
has them aborted: that is all there is to a client that goes away.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
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
CLIENT_LEFT = 499  # nginx's word for it; nobody reads it but the metrics


@dataclass
class ApiSettings:
    model: str  # the name under which it is served
    api_key: str | None = None
    max_concurrent: int = 1024  # sequences in flight
    max_body_bytes: int = 4 << 20
    hosts: tuple[str, ...] = ()  # names that clients may know it by; empty: any (see DNS rebinding)


SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
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

    # --- endpoints ---

    async def chat_completions(self, request: Request) -> Response:
        return await self.generate(request, ChatRequest, ChatForm)

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, CompletionRequest, TextForm)

    async def models(self, _request: Request) -> Response:
        return reply({"object": "list", "data": [self.card()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["model"])
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
        metrics = self.metrics
        if size > self.settings.max_concurrent:
            raise ApiError(400, f"the call has {size} sequences; at most {self.settings.max_concurrent} fit in here")
        if metrics.in_flight + size > self.settings.max_concurrent:
            message = f"{metrics.in_flight} of {self.settings.max_concurrent} sequences are under way; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        metrics.in_flight += size
        try:
            yield
        finally:
            metrics.in_flight -= size

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
        options = {"logprobs": ask.wants_logprobs, "include_usage": ask.include_usage}
        answer = Answer(form, self.settings.model, uids, ask.n, **options)
        updates = self.updates(ask.calls(uids), answer, start)
        if ask.stream:
            return EventStream(answer, updates)
        await unless_gone(request.receive, exhaust(updates))
        return json_response(await answer.whole())

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


async def exhaust(updates: AsyncGenerator) -> None:
    async for _ in updates:
        pass


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


class EventStream(Response):
    """Server-sent events, once the engine has taken all of the call: what is there, then every update as it comes.

    Until then an error has a status of its own. Owns the updates, and closes them.
    """

    def __init__(self, answer: Answer, updates: AsyncGenerator[Iterable[int]]):
        super().__init__(media_type="text/event-stream", headers=SSE_HEADERS)
        del self.headers["content-length"]
        self.answer, self.updates = answer, updates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.updates):
            try:
                await unless_gone(receive, self.pump(send))
            except ClientDisconnect:
                if not self.answer.accepted:  # else the status has gone out already
                    raise

    async def pump(self, send: Send) -> None:
        async def send_events(uids: Iterable[int]) -> None:
            events = self.answer.events(uids)
            if not self.answer.num_open:
                events += self.answer.ending()
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})

        while not self.answer.accepted:
            await anext(self.updates)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
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
        self.credentials = settings.api_key and f"Bearer {settings.api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit, size, status = self.settings.max_body_bytes, 0, None

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size <= limit:
                return message
            while message.get("more_body") and size < 8 * limit:  # one who can't finish sending hears no answer
                message = await receive()
                size += len(message.get("body", b""))
            raise ApiError(413, f"the body has more than {limit} bytes; send less")

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refusal = self.refusal(scope)
        try:
            return await (error_response(refusal) if refusal else self.app)(scope, limited, counted)
        finally:  # the answer to an unforeseen error is given further out
            name = getattr(scope.get("endpoint"), "__name__", None)  # who is refused has none
            route = scope["path"] if scope["path"] in ROUTES else PATHS.get(name, "other")
            self.metrics.requests[route, status or 500] += 1

    def refusal(self, scope: Scope) -> ApiError | None:
        """Of whoever has no key; or, where none is asked for, of a page that has this machine under a name of its own."""
        headers, hosts = dict(scope["headers"]), self.settings.hosts
        if scope["path"] in OPEN:
            return None
        if self.credentials:
            known = hmac.compare_digest(headers.get(b"authorization", b""), self.credentials)
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
            error = ApiError(500, "the server made a mistake; its log says more")
    headers |= HEADERS.get(error.status, {})
    return Response(error.body(), error.status, headers, "application/json")
