"""What a text must look like, in the words of OpenAI, SGLang and vLLM, as one grammar for the engine (see grammar/)."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from stage9_server.grammar import MAX_GRAMMAR
from stage9_server.openai_api.errors import ApiError

TYPES = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
Schema = dict[str, Any]


def as_schema(value: Any) -> Any:
    """SGLang takes a JSON schema as text, too."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise PydanticCustomError("schema", "must be a JSON schema") from None


AnySchema = Annotated[Schema, BeforeValidator(as_schema, str | Schema)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


class NamedSchema(BaseModel):
    model_config = TYPES
    name: str = ""
    description: str | None = None
    strict: bool | None = None  # it is followed in any case
    schema_: Schema = Field({}, alias="schema")


class ResponseFormat(BaseModel):
    model_config = TYPES
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def grammar(self) -> str:
        if self.type == "json_schema":
            if self.json_schema is None:
                raise ApiError(400, "response_format.json_schema is missing", "response_format", "invalid_value")
            return grammar("json", self.json_schema.schema_)
        return grammar("json", {"type": "object"}) if self.type == "json_object" else ""


class StructuredOutputs(BaseModel):
    """vLLM's."""

    model_config = TYPES
    json_: AnySchema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


def grammar(kind: str, value: Any) -> str:
    """As the engine takes it. ApiError if it is too long."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_GRAMMAR:
        message = f"the {kind} grammar has {len(text)} characters; {MAX_GRAMMAR} are allowed"
        raise ApiError(400, message, code="invalid_value")
    return f"{kind}:{text}"


FIELDS = (
    *("response_format", "regex", "ebnf", "json_schema", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def grammars_of(ask: Any) -> list[str]:
    """Of a request with the fields that say what a text must look like, each that is given."""
    vllm = ask.structured_outputs or StructuredOutputs()
    asked = [
        ("json", ask.json_schema), ("json", ask.guided_json), ("json", vllm.json_),
        ("json", {"type": "object"} if vllm.json_object else None),
        ("regex", ask.regex), ("regex", ask.guided_regex), ("regex", vllm.regex),
        ("choice", ask.guided_choice), ("choice", vllm.choice),
        ("ebnf", ask.ebnf), ("ebnf", ask.guided_grammar), ("ebnf", vllm.grammar),
    ]  # fmt: skip
    found = [grammar(kind, value) for kind, value in asked if value is not None]
    return found + ([ask.response_format.grammar] if ask.response_format and ask.response_format.grammar else [])


def only_one(grammars: list[str]) -> str:
    """Empty: any text will do. ApiError if several say what it must be."""
    if len(grammars) > 1:
        names = "response_format, tool_choice, json_schema, regex, ebnf, structured_outputs"
        raise ApiError(400, f"only one of {names} can say what the text must be", "response_format", "invalid_value")
    return grammars[0] if grammars else ""
