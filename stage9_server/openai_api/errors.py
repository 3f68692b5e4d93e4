"""Every error in OpenAI's form."""

import json

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.config import UserError
from stage9_server.hub import RequestFailed

HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}  # seconds
CLIENT_LEFT = 499  # nginx's number for it; only metrics and log show it
WORDS = {"json_invalid": "the body is no valid JSON: {}", "missing": "{} is missing"}


class ApiError(HTTPException):
    """An answer that is an error. `param` names the field, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message, HEADERS.get(status))
        self.param, self.code = param, code


def refused(name: str, way_out: str = "leave it out") -> ApiError:
    return ApiError(400, f"{name} is not supported; {way_out}", name, "unsupported_parameter")


def error_body(error: HTTPException | RequestFailed) -> bytes:
    status, message = (
        getattr(error, "status", None) or error.status_code,
        getattr(error, "message", None) or error.detail,
    )
    kind = "server_error" if status >= 500 else "invalid_request_error"
    content = {
        "message": message,
        "type": kind,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return json.dumps({"error": content}).encode()  # which takes any string, halves of surrogate pairs too


def from_validation(errors: list[dict]) -> ApiError:
    """The first thing that pydantic has against a request; its place in there names the field."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is no valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    if not place and first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type"):
        return ApiError(400, "the body must be a JSON object")
    if not place:  # of the request as a whole; the type names the field
        return ApiError(400, first["msg"], first["type"], "invalid_value")
    param = ".".join(place)[:100]
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    return ApiError(400, f"{param}: {first['msg']}", param, "invalid_value")


async def on_error(_request: Request, error: Exception) -> Response:
    """Without `async` it would run in a thread."""
    match error:
        case RequestValidationError():
            error = from_validation(error.errors())
        case RequestFailed():
            error = ApiError(error.status, error.message)
        case UserError():
            error = ApiError(400, str(error))
        case UnicodeEncodeError():
            error = ApiError(400, "the text is no Unicode: it has half a surrogate pair", code="invalid_value")
        case ApiError():
            pass
        case HTTPException():
            if isinstance(error.__cause__, ClientDisconnect):
                return Response(status_code=CLIENT_LEFT)
            allowed = (error.headers or {}).get("Allow")
            way_out = f"use {allowed}" if allowed else "GET / lists what there is"
            error = HTTPException(error.status_code, f"{error.detail}: {way_out}", error.headers)
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case _:
            error = ApiError(500, "internal error; the server's log has the details")
    return Response(error_body(error), error.status_code, error.headers, "application/json")
