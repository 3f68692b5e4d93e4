"""Which addresses there are: OpenAI's, SGLang's own (which its router asks), and those for people and for tools that watch."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from stage9_server.messages import Detokenize
from stage9_server.openai_api.answers import ChatAnswer, GenerateAnswer, TextAnswer, encode
from stage9_server.openai_api.errors import ApiError
from stage9_server.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from stage9_server.openai_api.app import Api

TITLE = "SGLang from zero"
PAGE = Path(__file__).with_name("page.html")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


WHOLE, STREAM = {"application/json": {}}, {"text/event-stream": {}}
ERRORS = {status: {"model": Error, "description": "An error"} for status in ("4XX", "5XX")}
JSON_OR_STREAM = ERRORS | {
    200: {"description": "The answer, whole or as server-sent events", "content": WHOLE | STREAM}
}
TEXT = {200: {"description": "Text", "content": {"text/plain": {}}}}
HTML = {200: {"description": "A page", "content": {"text/html": {}}}}


def reply(content: dict | list) -> Response:
    return Response(encode(content), media_type="application/json")


def add_routes(app: FastAPI, api: "Api") -> None:
    hub, started_at = api.hub, int(time.time())
    get, post = (partial(method, responses=ERRORS, response_model=None) for method in (app.get, app.post))

    @app.post("/v1/chat/completions", responses=JSON_OR_STREAM, response_model=None)
    async def chat_completions(ask: ChatRequest, request: Request) -> Response:
        return api.generate(request, ask, ChatAnswer)

    @app.post("/v1/completions", responses=JSON_OR_STREAM, response_model=None)
    async def completions(ask: CompletionRequest, request: Request) -> Response:
        return api.generate(request, ask, TextAnswer)

    @app.post("/generate", responses=JSON_OR_STREAM, response_model=None)
    async def generate(ask: GenerateRequest, request: Request) -> Response:
        try:
            completion = ask.completion(ask.model or api.models[0])
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        delivery = api.generate(request, completion, GenerateAnswer)
        delivery.answer.single = ask.single
        return delivery

    def card(name: str) -> dict:
        facts = {"max_model_len": api.max_len, "vocab_size": hub.info["vocab_size"]}
        return {
            "id": name,
            "object": "model",
            "created": started_at,
            "owned_by": "sglang-from-zero",
            "root": api.models[0],
        } | facts

    @get("/v1/models")
    @get("/v1/models/", include_in_schema=False)
    async def models() -> Response:
        return reply({"object": "list", "data": [card(name) for name in api.models]})

    @get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        api.check_model(model)
        return reply(card(model))

    @post("/tokenize")
    async def tokenize(ask: TokenizeRequest) -> Response:
        api.check_model(ask.model)
        tokens = (await api.ask(ask.call(hub.new_uids(1)))).token_ids
        return reply({"tokens": tokens, "count": len(tokens), "max_model_len": api.max_len})

    @post("/detokenize")
    async def detokenize(ask: DetokenizeRequest) -> Response:
        api.check_model(ask.model)
        return reply({"text": (await api.ask(Detokenize(hub.new_uids(1), ask.tokens))).text})

    @get("/model_info")
    @get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        info = {"model_path": hub.info["model"], "served_model_name": api.models[0], "is_generation": True}
        return reply(
            info
            | {"tokenizer_path": hub.info["model"], "max_model_len": api.max_len, "vocab_size": hub.info["vocab_size"]}
        )

    @get("/server_info")
    @get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        names = {"served_model_name": api.models[0], "served_model_names": api.models}
        return reply(hub.info["engine"] | names | {"model_path": hub.info["model"], "max_model_len": api.max_len})

    @get("/get_load")
    async def get_load() -> Response:
        waiting = hub.stats.waiting if hub.stats else 0
        return reply([{"dp_rank": 0, "num_reqs": api.metrics.in_flight, "num_waiting_reqs": waiting}])

    @post("/flush_cache")
    async def flush_cache() -> Response:
        """Later requests find no prefix of earlier ones. The memory is taken from those when it is needed."""
        api.flushes += 1
        return reply({"success": True})

    @get("/health")
    @get("/health_generate", include_in_schema=False)
    async def health() -> Response:
        if reason := hub.health():
            raise ApiError(503, reason)
        return reply({"status": "ok"})

    @app.get("/metrics", responses=TEXT, response_model=None)
    async def metrics() -> Response:
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", responses=HTML, response_model=None)
    async def page() -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html")
