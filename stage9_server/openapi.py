"""The API as an OpenAPI document: what a body may hold, from the very models that check it, and how errors look.

What depends on several fields at once, or on the model (lengths, the vocabulary), has no place in it and is a 400.
"""

from pydantic.json_schema import models_json_schema

from stage9_server.protocol import (
    IGNORED,
    REFUSED,
    REFUSED_IN_MESSAGES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

TEMPLATE = "#/components/schemas/{model}"
BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
STREAMED = ("/v1/chat/completions", "/v1/completions")
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/metrics")
ERRORS = {
    400: "The request is wrong; the message says how",
    401: "The key is missing or wrong",
    403: "The server does not go by that name (without a key, on a loopback address)",
    404: "There is no such model",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "Too many sequences or log-probabilities are in flight, or too many bytes of requests",
    500: "The server, or one of its processes, failed",
    503: "The queue is full, or something is being restarted or shut down",
}
TEXT, NULL = {"type": "string"}, {"type": "null"}
ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": TEXT,
        "type": {"enum": ["invalid_request_error", "server_error"]},
        "param": {"anyOf": [TEXT, NULL]},
        "code": {"anyOf": [TEXT, NULL]},
    },
}


def document(title: str, model: str) -> dict:
    """model: the name under which it is served."""
    schemas = models_json_schema([(kind, "validation") for kind in BODIES.values()], ref_template=TEMPLATE)[1]["$defs"]
    for path, kind in BODIES.items():
        tell_all(schemas[kind.__name__], REFUSED, IGNORED)
        schemas[kind.__name__]["properties"]["model"] = {"enum": [model, *([] if path in STREAMED else [None])]}
    tell_all(schemas["Message"], REFUSED_IN_MESSAGES, ())
    tell_all(schemas["StreamOptions"], {}, ())
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": ERROR}}
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": {path: {"post": posting(path)} for path in BODIES} | {path: {"get": getting(path)} for path in GETS},
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
    }


def tell_all(schema: dict, refused: dict, ignored) -> None:
    """Add what `protocol.asked` takes besides: null for what may be left out, and fields without effect."""
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required:
            schema["properties"][name] = {"anyOf": [field, NULL]}
    schema["properties"] |= {name: {"enum": [*values, None]} for name, values in refused.items()}
    schema["properties"] |= {name: {} for name in ignored}


def posting(path: str) -> dict:
    body = {"schema": {"$ref": TEMPLATE.format(model=BODIES[path].__name__)}}
    answer = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        answer["text/event-stream"] = {}  # server-sent events, which a schema can't describe
    return operation(path, answer) | {"requestBody": {"required": True, "content": {"application/json": body}}}


def getting(path: str) -> dict:
    answer = (
        {"text/plain": {"schema": TEXT}} if path == "/metrics" else {"application/json": {"schema": {"type": "object"}}}
    )
    model = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    return operation(path, answer) | {"parameters": [model] if "{model}" in path else []}


def operation(path: str, answer: dict) -> dict:
    error = {"application/json": {"schema": {"$ref": TEMPLATE.format(model="Error")}}}
    errors = {str(status): {"description": text, "content": error} for status, text in ERRORS.items()}
    open_to_all = path in ("/health", "/metrics")
    return {
        "responses": {"200": {"description": "The answer", "content": answer}, **errors},
        "security": [] if open_to_all else [{}, {"key": []}],
    }
