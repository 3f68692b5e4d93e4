"""The API server's side of a live trace: the page, and the stream of lines that it follows. Only there with --inspect."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import HTMLResponse, StreamingResponse

from stage9_server.hub import Hub
from stage9_server.inspector.messages import Inspect, Inspected
from stage9_server.ipc import SCHEDULER
from stage9_server.openai_api.errors import ApiError

PAGE = Path(__file__).with_name("page.html")
WHAT = ("off", "steps", "text")
MAX_VIEWERS, MAX_BEHIND = 8, 256  # who is so many messages behind is let go, and may come again


class Viewers:
    """Who looks on. text: may they read what is said?"""

    def __init__(self, hub: Hub, text: bool):
        self.hub, self.text = hub, text
        self.queues: dict[asyncio.Queue[Inspected | None], bool] = {}  # -> has it had the header?
        hub.look_on = self.tell

    def tell(self, message: Inspected) -> None:
        for queue in list(self.queues):
            if queue.qsize() < MAX_BEHIND:
                queue.put_nowait(message)
            else:
                del self.queues[queue]
                queue.put_nowait(None)

    def ask(self, anew: bool) -> None:
        self.hub.send(SCHEDULER, Inspect(bool(self.queues), self.text, anew))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: the header, a key frame, and the lines as they come."""
        queue: asyncio.Queue[Inspected | None] = asyncio.Queue()
        self.queues[queue], greeted = True, False
        self.ask(anew=True)
        try:
            while not self.hub.draining:
                try:
                    async with asyncio.timeout(1.0):
                        message = await queue.get()
                except TimeoutError:
                    self.ask(anew=False)  # the engine may be another one than before
                    yield b": nothing new\n\n"
                    continue
                if message is None:
                    return
                yield b"".join(
                    b"data: " + line + b"\n\n" for line in ([] if greeted else [message.header]) + message.lines
                )
                greeted = True
        finally:
            self.queues.pop(queue, None)
            if not self.queues:
                self.ask(anew=False)


def add_flag(parser: argparse.ArgumentParser) -> None:
    seen = "show the engine's steps at /inspector: steps, or text for what the tokens say as well"
    parser.add_argument("--inspect", choices=WHAT, default=WHAT[0], help=f"{seen} (default: {WHAT[0]})")


def add_inspector(app: FastAPI, hub: Hub, what: str) -> None:
    """The routes, unless `what` is off. The page holds no data and needs no key; the stream does."""
    if what == "off":
        return
    viewers = Viewers(hub, text=what == "text")
    page = PAGE.read_text().replace("<body>", '<body data-follow="inspector/events">', 1)

    @app.get("/inspector", include_in_schema=False)
    async def inspector() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    @app.get("/inspector/events", include_in_schema=False)
    async def events() -> StreamingResponse:
        if len(viewers.queues) >= MAX_VIEWERS:
            raise ApiError(429, f"{MAX_VIEWERS} are looking on already; try again later", code="rate_limit_exceeded")
        return StreamingResponse(
            viewers.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
