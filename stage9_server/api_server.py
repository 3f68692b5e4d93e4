"""The HTTP side: generates the answer to a call and sends it.

A call's sequences belong to the hub, and leaving `hub.stream` early, for whatever reason, has them aborted: that is all
there is to a client that goes away. Which addresses there are, and what a request or an answer looks like: openai_api/.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager, aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stage9_server.hub import Hub, RequestFailed
from stage9_server.messages import Tokenize
from stage9_server.observe.metrics import Watch
from stage9_server.openai_api.answers import SSE_HEADERS, Answer
from stage9_server.openai_api.errors import error_body


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
    first piece, or before it, once the engine has taken all of the call."""

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

    async def start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class WholeAnswer(Delivery):
    """One JSON object, once all of it is there."""

    async def deliver(self, send: Send) -> None:
        async with aclosing(self.hub.stream(self.calls)) as stream:
            async for pieces in stream:
                self.watch.count(pieces)
                self.answer.add(pieces)
        body = await self.answer.whole()
        await self.start(send, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
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
