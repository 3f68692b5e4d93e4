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
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import CompletionChoice
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from stage9_server import local_server
from stage9_server.openai_api import formats, requests
from tests.test_stage9_api import CHAT, HELLO, TEXT, FakeHub, app_of, events, post, wait_until_idle

CHECKS = [
    checks.negative_data_rejection,  # what the document does not allow, the server refuses
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    schemathesis.checks.not_a_server_error,
]
SECONDS = 3  # for one endpoint's good or bad requests; what is left of the examples after that is skipped
GOOD, BAD = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
POSTS = (CHAT, TEXT, "/generate", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model}", "/model_info", "/server_info", "/get_load", "/health", "/metrics", "/")
OPERATIONS = [("POST", path, mode) for path in POSTS for mode in (GOOD, BAD) if (path, mode) != ("/generate", BAD)]
OPERATIONS += [("GET", path, GOOD) for path in GETS]
STATUSES = {200, 400, 404, 405, 413, 415, 429, 503}


class Chunk(Completion):
    """OpenAI's type for whole answers says that a choice has a reason; in a stream only the last has one."""

    choices: list[type("ChunkChoice", (CompletionChoice,), {"__annotations__": {"finish_reason": str | None}})]


TYPES = {CHAT: (ChatCompletion, ChatCompletionChunk), TEXT: (Completion, Chunk), "/v1/models/{model}": (Model, None)}


@pytest.fixture(scope="module")
def server(text_checkpoint):
    flags = ("--device=cpu", "--dtype=float32", "--max-model-len=64", "--page-size=8", "--port=0", "--max-running=64")
    with local_server.running("--model", str(text_checkpoint.path), *flags) as running:
        yield running


def document_of(content: dict, model: str) -> dict:
    """The server's document, with what no document can know in advance: the model's name, and what depends on other fields."""
    for name in ("ChatRequest", "CompletionRequest"):
        content["components"]["schemas"][name]["properties"] |= {
            "model": {"enum": [model]},
            "min_tokens": {"enum": [0, 1]},
        }
    generate = content["components"]["schemas"]["GenerateRequest"]
    generate["required"] = ["text"]
    generate["properties"] |= {"text": {"type": "string"}, "input_ids": {"type": "null"}}
    generate["properties"] |= {"sampling_params": {"enum": [{}, {"max_new_tokens": 2}]}}
    for name in ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest"):
        content["components"]["schemas"][name]["properties"]["model"] = {"enum": [model, None]}
    return content


@pytest.fixture(scope="module")
def document(server, text_checkpoint):
    content = document_of(httpx.get(f"{server.url}/openapi.json").json(), str(text_checkpoint.path))
    result = schemathesis.openapi.from_dict(content)
    result.config.max_stream_events = 1 << 20  # streams are read to their end, and not only the first 20 events
    return result


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_those_of_the_document(server, document, method, path, mode):
    end, seen = time.monotonic() + SECONDS, set()
    operation = document[path][method]

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def run(case):
        if time.monotonic() < end or (
            mode is GOOD and 200 not in seen
        ):  # also on a slow machine one good answer at least
            if mode is GOOD and isinstance(case.body, dict):  # what is a grammar no document can say; tools take room
                for fields in (case.body, case.body.get("sampling_params") or {}):
                    for name in (*formats.FIELDS, "tool_choice", "tools"):
                        fields.pop(name, None)
            answer = case.call(base_url=server.url, timeout=60)
            seen.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code == 200:
                parse(path, answer.headers["content-type"][0], answer.content)

    run()
    assert seen <= STATUSES
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
        for data in chunks if chunk else []:  # SGLang's own form has no type there
            strict(chunk, json.loads(data))
    elif whole:
        strict(whole, json.loads(content))


def strict(kind: type[BaseModel], content: dict) -> None:
    kind.model_validate(content, strict=True)


def test_one_model_is_a_model_card(server, text_checkpoint):
    answer = httpx.get(f"{server.url}/v1/models/{text_checkpoint.path}")
    strict(Model, answer.json())


def own_document() -> dict:
    return app_of(FakeHub()).openapi()


def test_the_document_knows_what_may_be_named():
    schemas = own_document()["components"]["schemas"]
    for kind in ("ChatRequest", "CompletionRequest"):
        found = schemas[kind]["properties"]
        assert {name: found[name] for name in requests.NEUTRAL} == {
            name: {"enum": [*values, None]} for name, values in requests.NEUTRAL.items()
        }


def test_the_document_is_about_all_endpoints():
    paths = own_document()["paths"]
    told = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert told == {*(("POST", path) for path in (*POSTS, "/flush_cache")), *(("GET", path) for path in GETS)}


@pytest.mark.parametrize(("fields", "accepted"), [
    ({"stop": "e"}, True), ({"stop": ["e"] * 17}, False), ({"stream_options": None}, True), ({"tools": []}, True),
    ({"tools": [{}]}, False), ({"user": {"any": "thing"}}, True), ({"temperature": 3}, False), ({"model": "x"}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True), ({"mood": 1}, True),
    ({"messages": [HELLO[0] | {"name": None}]}, True), ({"messages": [{"content": "x"}]}, False),
])  # fmt: skip
def test_document_and_server_agree(server, text_checkpoint, fields, accepted):
    body = {"model": str(text_checkpoint.path), "messages": HELLO, "max_tokens": 1} | fields
    schema = document_of(own_document(), str(text_checkpoint.path))
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": schema["components"]}
    assert jsonschema_rs.is_valid(schema, body) == accepted
    assert (post(server.url, CHAT, body)[0] == 200) == accepted
