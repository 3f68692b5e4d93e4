"""The server against its own OpenAPI document. schemathesis makes requests from it, good and bad ones; every answer must
be one that the document names, and the openai package's types must parse what is not an error.
"""

import json
import time

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import CompletionChoice
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from stage9_server import launch, openapi, protocol
from stage9_server.api_server import ROUTES
from tests.test_stage9_api import CHAT, HELLO, TEXT, events, post, wait_until_idle

CHECKS = [
    checks.negative_data_rejection,  # what the document does not allow, the server refuses
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    schemathesis.checks.not_a_server_error,
]
SECONDS = 3  # for one endpoint's good or bad requests; what is left of the examples after that is skipped
GOOD, BAD = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [("POST", path, mode) for path in openapi.BODIES for mode in (GOOD, BAD)]
OPERATIONS += [("GET", path, GOOD) for path in openapi.GETS]


class Chunk(Completion):
    """OpenAI's type for whole answers says that a choice has a reason; in a stream only the last has one."""

    choices: list[type("ChunkChoice", (CompletionChoice,), {"__annotations__": {"finish_reason": str | None}})]


TYPES = {CHAT: (ChatCompletion, ChatCompletionChunk), TEXT: (Completion, Chunk), "/v1/models/{model}": (Model, None)}


@pytest.fixture(scope="module")
def server(text_checkpoint):
    flags = ("--device=cpu", "--dtype=float32", "--max-model-len=64", "--page-size=8", "--port=0", "--max-running=64")
    with launch.running("--model", str(text_checkpoint.path), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def document(server):
    result = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    result.config.max_stream_events = 1 << 20  # streams are read to their end, and not only the first 20 events
    return result


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_those_of_the_document(server, document, method, path, mode):
    end, seen = time.monotonic() + SECONDS, set()
    operation = document[path][method]

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def run(case):
        if time.monotonic() < end:
            answer = case.call(base_url=server.url, timeout=60)
            seen.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code == 200:
                parse(path, answer.headers["content-type"][0], answer.content)

    run()
    assert seen <= {200, *openapi.ERRORS, 405}
    if mode is GOOD and "{" not in path:
        assert 200 in seen


def test_a_long_stream_is_read_to_its_end(server, document, text_checkpoint):
    body = {"model": str(text_checkpoint.path), "prompt": "hi", "max_tokens": 40, "ignore_eos": True, "stream": True}
    case = document[TEXT]["POST"].Case(body=body | {"n": 4}, media_type="application/json")
    assert events(case.call(base_url=server.url, timeout=60).content)[-1] == "[DONE]"


def test_nothing_of_all_that_is_left(server):
    wait_until_idle(server.url)


def parse(path: str, content_type: str, content: bytes) -> None:
    """With the types of the openai package, strictly."""
    whole, chunk = TYPES.get(path, (None, None))
    if content_type.startswith("text/event-stream"):
        *chunks, done = events(content)
        assert done == "[DONE]"
        for data in chunks:
            strict(chunk, json.loads(data))
    elif whole:
        strict(whole, json.loads(content))


def strict(kind: type[BaseModel], content: dict) -> None:
    kind.model_validate(content, strict=True)


def test_one_model_is_a_model_card(server, text_checkpoint):
    answer = httpx.get(f"{server.url}/v1/models/{text_checkpoint.path}")
    strict(Model, answer.json())


@given(st.sampled_from(sorted(protocol.REFUSED)))
@settings(deadline=None)
def test_the_document_knows_what_may_be_named(name):
    schemas = openapi.document("t", "m")["components"]["schemas"]
    for kind in ("ChatRequest", "CompletionRequest"):
        assert schemas[kind]["properties"][name] == {"enum": [*protocol.REFUSED[name], None]}
        assert schemas[kind]["properties"].keys() >= protocol.IGNORED
        assert schemas[kind]["additionalProperties"] is False


def test_the_document_is_about_all_endpoints():
    paths = openapi.document("t", "m")["paths"]
    told = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    routes = {(path.replace(":path", ""), method) for path, (method, _) in ROUTES.items()}
    assert routes - told == {("/openapi.json", "GET")} and told <= routes


@pytest.mark.parametrize(("fields", "accepted"), [
    ({"stop": "e"}, True), ({"stop": ["e"] * 17}, False), ({"stream_options": None}, True), ({"tools": []}, True),
    ({"tools": [{}]}, False), ({"user": {"any": "thing"}}, True), ({"temperature": 3}, False), ({"model": "x"}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True), ({"mood": 1}, False),
    ({"messages": [HELLO[0] | {"name": None}]}, True), ({"messages": [{"role": "user"}]}, False),
])  # fmt: skip
def test_document_and_server_agree(server, text_checkpoint, fields, accepted):
    body = {"model": str(text_checkpoint.path), "messages": HELLO, "max_tokens": 1} | fields
    schema = openapi.document("t", str(text_checkpoint.path))
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": schema["components"]}
    assert jsonschema_rs.is_valid(schema, body) == accepted
    assert (post(server.url, CHAT, body)[0] == 200) == accepted
