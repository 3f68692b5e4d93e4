"""The HTTP side: from a request to the hub, and from the pieces that come back to an answer.

A call's sequences belong to the hub, and leaving `hub.stream` early, for whatever reason, has them aborted: that is all
there is to a client that goes away. Which addresses there are, and what a request or an answer looks like: openai_api/.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager, aclosing

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.config import UserError
from stage9_server.guard.guard import Guard, NoGuard
from stage9_server.hub import Hub, RequestFailed
from stage9_server.messages import Tokenize
from stage9_server.observe.logs import Ignored, Observed
from stage9_server.observe.metrics import Metrics, Watch
from stage9_server.openai_api.answers import Answer
from stage9_server.openai_api.errors import ApiError, error_body, on_error
from stage9_server.openai_api.requests import Sampling
from stage9_server.openai_api.routes import TITLE, add_routes

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def create_app(hub: Hub, models: list[str], guard: Guard | NoGuard, cors: tuple[str, ...] = ()) -> FastAPI:
    """models: the names under which the model is served. cors: origins whose pages may call us (see the chapter)."""
    app = FastAPI(title=TITLE, redoc_url=None)
    api = Api(hub, models, guard)
    add_routes(app, api)
    for kind in (RequestValidationError, RequestFailed, UserError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    guard.install(app)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.add_middleware(Observed, metrics=api.metrics, paths=[route.path for route in app.routes])
    return app


class Api:
    """What the routes share."""

    def __init__(self, hub: Hub, models: list[str], guard: Guard | NoGuard):
        self.hub, self.models, self.guard = hub, models, guard
        self.metrics, self.ignored = Metrics(models[0], lambda: hub.stats), Ignored()
        self.flushes = 0  # how often the prefix cache was emptied

    @property
    def max_len(self) -> int:
        return self.hub.info["max_len"]

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.models:
            message = f"the model {name[:100]!r} does not exist; this server has {', '.join(map(repr, self.models))}"
            raise ApiError(404, message, "model", "model_not_found")

    def generate(self, request: Request, ask: Sampling, kind: type[Answer]) -> "Delivery":
        """The answer, which is generated when it is sent."""
        self.check_model(ask.model)
        self.ignored.tell(request.client.host if request.client else "", ask.unknown)
        request_id, uids = request.scope["request_id"], self.hub.new_uids(ask.num_sequences)
        if self.flushes:  # prefixes are shared among equal salts only, so what is older is not found any more
            ask.cache_salt = f"{self.flushes}:{ask.cache_salt}"
        return (EventStream if ask.stream else WholeAnswer)(
            self.hub,
            ask.calls(uids, self.max_len),
            kind(ask, uids, request_id),
            self.guard.room(ask.num_sequences, ask.num_logprobs(self.max_len)),
            Watch(self.metrics, request_id, uids, ask.n),
        )


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
    """Generates an answer and sends it. Until its status has gone out, an error has a status of its own: it goes out with the
    first piece, and so says that the engine has taken the call."""

    def __init__(self, hub: Hub, calls: list[Tokenize], answer: Answer, room: AbstractContextManager, watch: Watch):
        super().__init__()
        self.hub, self.calls, self.answer, self.room, self.watch = hub, calls, answer, room, watch
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.room, self.watch:
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
        async with aclosing(self.hub.stream(self.calls)) as stream:
            async for pieces in stream:
                self.watch.count(pieces)
                self.answer.add(pieces)
        body = await self.answer.whole()
        await self.start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # waits until the client has read the rest


class EventStream(Delivery):
    """Server-sent events, piece by piece as they come."""

    async def deliver(self, send: Send) -> None:
        last = b""
        try:
            async with aclosing(self.hub.stream(self.calls)) as stream:
                async for pieces in stream:
                    self.watch.count(pieces)
                    if not self.started:
                        await self.start(send, SSE_HEADERS)
                    if events := self.answer.events(pieces):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
        except RequestFailed as error:
            if not self.started:
                raise
            last = b"data: " + error_body(error) + b"\n\n"
        await send({"type": "http.response.body", "body": last})
