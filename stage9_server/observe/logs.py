"""What the server says of its work: a line per request, one of throughput while there is work, one for each field that is
ignored. No text of a user is in any of them.
"""

import asyncio
import logging
import re
import sys
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from stage9_server.hub import Hub
    from stage9_server.observe.metrics import Metrics

LEVELS = ("debug", "info", "warning", "error")
ID_HEADER = b"x-request-id"
GIVEN_ID = re.compile(rb"[\w.:-]{1,128}")  # others are replaced
THROUGHPUT_SECONDS = 5.0
MOST_TOLD = 1024  # fields of clients that are remembered

log = logging.getLogger("stage9_server")


def configure(level: str) -> None:
    """Once, for the API server's process."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="[%(asctime)s %(levelname)s] %(message)s")
    for name in ("httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Observed:
    """Around the app: every request has an id, the client's (X-Request-Id) or one of ours, and is counted."""

    def __init__(self, app: ASGIApp, metrics: "Metrics", paths: list[str]):
        self.app, self.metrics, self.paths = app, metrics, set(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given, status = dict(scope["headers"]).get(ID_HEADER, b""), None
        request_id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID_HEADER, request_id)]
            await send(message)

        try:
            return await self.app(scope, receive, counted)
        finally:  # the answer to an unforeseen error is given further out
            route = getattr(scope.get("route"), "path", scope["path"])
            self.metrics.requests[route if route in self.paths else "other", status or 500] += 1


class Ignored:
    """Fields of requests that are not known: told once for each field and client."""

    def __init__(self):
        self.told: Counter[tuple[str, str]] = Counter()

    def tell(self, client: str, fields: list[str]) -> None:
        for field in fields:
            if (client, field) not in self.told and len(self.told) < MOST_TOLD:
                log.warning("ignored a field that is not known: %r, from %s", field, client)
                self.told[client, field] += 1


async def throughput_lines(hub: "Hub", seconds: float = THROUGHPUT_SECONDS) -> None:
    """When the workers are ready, how long that took; then, for ever, one line per so many seconds if there is work."""
    before, start = None, time.monotonic()
    while len(hub.up) < len(hub.names):
        await asyncio.sleep(0.05)
    log.info("ready after %.1f s", time.monotonic() - start)
    while log.isEnabledFor(logging.INFO):
        await asyncio.sleep(seconds)
        s = hub.stats
        if s and before and (s.running or s.waiting or s.steps > before.steps):
            log.info(
                "running %d, queued %d; KV pool %.0f %% used; %.1f output tokens/s; cache hits %.0f %%",
                s.running, s.waiting, 100 * s.usage, (s.output_tokens - before.output_tokens) / seconds,
                100 * s.hit_tokens / max(1, s.prompt_tokens),
            )  # fmt: skip
        before = s
