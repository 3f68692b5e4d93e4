"""Before all routes: the key, the name of the host, the kind of body and its size."""

import hmac
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage9_server.openai_api.errors import ApiError, on_error

if TYPE_CHECKING:
    from stage9_server.guard.guard import Limits

OPEN = ("/", "/health", "/health_generate", "/metrics")  # need no key
BODILESS = ("/flush_cache",)  # a POST to these has nothing to say
NO_KEY = ("give the server's key, in the header Authorization: Bearer KEY", None, "invalid_api_key")
OTHERS = "to be called by another, it needs --api-key, or --host with an address that others may reach"
BODIES = 64  # requests of the largest size that are in memory at the same time


class Gate:
    def __init__(self, app: ASGIApp, limits: "Limits"):
        self.app, self.limits = app, limits
        self.key = limits.api_key and limits.api_key.encode()
        self.body_bytes = 0  # of requests that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit, size, kept = self.limits.max_body_bytes, 0, 0

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

        refusal = self.refusal(scope)
        try:
            return await (await on_error(None, refusal) if refusal else self.app)(scope, limited, send)
        finally:
            self.body_bytes -= kept

    def refusal(self, scope: Scope) -> ApiError | None:
        """A request without the key is refused. Without a key, one whose Host header is not an address of this machine: it comes
        from a web page whose domain was pointed here (DNS rebinding). And what is posted has to be JSON, because a browser must
        ask us before a foreign page may send that.
        """
        headers, hosts, path = dict(scope["headers"]), self.limits.hosts, scope["path"]
        if path not in OPEN and self.key:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if not (hmac.compare_digest(key.lstrip(b" "), self.key) and scheme.lower() == b"bearer"):
                return ApiError(401, *NO_KEY)
        elif path not in OPEN and hosts and host_name(headers.get(b"host", b"")) not in hosts:
            return ApiError(403, f"this server goes by the name of {' or '.join(hosts)} only; {OTHERS}")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        by_a_program = path in BODILESS and b"origin" not in headers
        if scope["method"] == "POST" and kind != b"application/json" and not by_a_program:
            return ApiError(415, "send JSON, with the header Content-Type: application/json")
        return None


def host_name(header: bytes) -> str | None:
    with suppress(ValueError):
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    return None
