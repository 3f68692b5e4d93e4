"""The app: all routes, what stands in front of them, and what they share."""

import asyncio

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.config import UserError
from stage9_server.api_server import Delivery, EventStream, WholeAnswer
from stage9_server.guard.guard import Guard, NoGuard
from stage9_server.hub import Hub, RequestFailed
from stage9_server.inspector.routes import add_inspector
from stage9_server.messages import Detokenize, Detokenized, Failed, Tokenize, Tokenized
from stage9_server.observe.logs import Ignored, Observed
from stage9_server.observe.metrics import Metrics, Watch
from stage9_server.openai_api.answers import Answer
from stage9_server.openai_api.errors import ApiError, on_error
from stage9_server.openai_api.requests import ChatRequest, Sampling
from stage9_server.openai_api.routes import TITLE, add_routes


def create_app(
    hub: Hub,
    models: list[str],
    guard: Guard | NoGuard,
    cors: tuple[str, ...] = (),
    tool_format: str | None = None,
    inspect: str = "off",
) -> FastAPI:
    """models: the names under which the model is served. cors: origins whose pages may call us (see the chapter).
    tool_format: how the model writes calls of tools; None: as its chat template says. inspect: what /inspector shows."""
    app = FastAPI(title=TITLE, redoc_url=None)
    api = Api(hub, models, guard, tool_format)
    add_routes(app, api)
    add_inspector(app, hub, inspect)
    for kind in (
        RequestValidationError,
        RequestFailed,
        UserError,
        UnicodeEncodeError,
        HTTPException,
        ClientDisconnect,
        Exception,
    ):
        app.add_exception_handler(kind, on_error)
    guard.install(app)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.add_middleware(Observed, metrics=api.metrics, paths=[route.path for route in app.routes])
    return app


class Api:
    """What the routes share."""

    def __init__(self, hub: Hub, models: list[str], guard: Guard | NoGuard, tool_format: str | None):
        self.hub, self.models, self.guard, self.tool_format = hub, models, guard, tool_format
        self.metrics, self.ignored = Metrics(models[0], lambda: hub.stats), Ignored()
        self.flushes = 0  # how often the prefix cache was emptied

    @property
    def max_len(self) -> int:
        return self.hub.info["max_len"]

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.models:
            message = f"the model {name[:100]!r} does not exist; this server has {', '.join(map(repr, self.models))}"
            raise ApiError(404, message, "model", "model_not_found")

    async def ask(self, message: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Of a tokenizer."""
        answers: asyncio.Queue = asyncio.Queue()
        with self.guard.room(1):
            try:
                await self.hub.submit(message, answers, generates=False)
                answer = await answers.get()
            finally:
                self.hub.abort(message.uids)
        if isinstance(answer, Failed):
            raise RequestFailed(answer.status, answer.message)
        return answer

    def generate(self, request: Request, ask: Sampling, kind: type[Answer]) -> Delivery:
        """The answer, which is generated when it is sent."""
        self.check_model(ask.model)
        self.ignored.tell(request.client.host if request.client else "", ask.unknown)
        request_id, uids = request.scope["request_id"], self.hub.new_uids(ask.num_sequences)
        if isinstance(ask, ChatRequest):
            ask.use_format(self.tool_format or self.hub.info["tool_format"])
        if self.flushes:  # prefixes are shared among equal salts only, so what is older is not found any more
            ask.cache_salt = f"{self.flushes}:{ask.cache_salt}"
        return (EventStream if ask.stream else WholeAnswer)(
            self.hub,
            ask.calls(uids, self.max_len),
            kind(ask, uids, request_id),
            self.guard.room(ask.num_sequences, ask.num_logprobs(self.max_len)),
            Watch(self.metrics, request_id, uids, ask.n),
        )
