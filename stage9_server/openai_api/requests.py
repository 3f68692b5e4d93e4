"""Requests as pydantic models, strict about types and ranges, tolerant of what changes nothing.

A field of a model is honoured. One in its table NEUTRAL is known and not supported: the values there, besides null, ask for
nothing; any other is refused, since the answer would not be the one that was asked for. Whatever else comes is ignored, and
logged (`unknown`). null always means "not given".
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from stage2_req.params import MAX_COUNT, MAX_LOGPROBS
from stage7_radix.params import RequestParams
from stage9_server.messages import TextOptions, Tokenize
from stage9_server.openai_api.errors import ApiError, refused
from stage9_server.openai_api.formats import (
    AnySchema,
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    Text,
    grammar,
    grammars_of,
    only_one,
)
from stage9_server.openai_api.tools import FORMATS, ToolFormat, calls_grammar

MAX_CHOICES, MAX_SEQUENCES = 16, 256  # n, and prompts times n in one call
MAX_MESSAGES = 2048  # of a chat, and parts of a message
MAX_TOKENS = 1 << 20  # of one prompt
MAX_UNKNOWN, MAX_NAME = 64, 64  # fields that are ignored, and characters of their names that are logged

# Known, and without effect on an answer.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "rid",
        "priority",
        "log_metrics",
        "stream_reasoning",
    }
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
NEUTRAL = {  # of both endpoints
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (0,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "chat_template": (),
    "lora_path": (),
    "custom_logit_processor": (),
    "logits_processors": ([],),
}


def asks_like(value: Any, other: Any) -> bool:
    """Equal as JSON: 0 is not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def tidied(neutral: dict[str, tuple], ignored: frozenset[str] = frozenset()) -> Any:
    """For a model: what comes, without what is null or asks for nothing; of the unknown the names, with the value None.

    ApiError for what is known, not supported, and asked for.
    """

    def tidy(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known, given, unknown = cls.model_fields, {}, []
        for name, value in fields.items():
            if value is None:
                continue
            if name in known:
                given[name] = value
            elif name not in neutral and name not in ignored:
                unknown.append(name[:MAX_NAME])
            elif name in neutral and not any(asks_like(value, nothing) for nothing in neutral[name]):
                raise refused(name)
        if len(unknown) > MAX_UNKNOWN:
            raise ApiError(400, f"{unknown[0]} and {len(unknown) - 1} others are no known parameters", unknown[0])
        return given | dict.fromkeys(unknown)

    return model_validator(mode="before")(classmethod(tidy))


def documented(schema: dict, cls: type[BaseModel]) -> None:
    """For the OpenAPI document: null for what may be left out, and the neutral values of what is not supported."""
    if cls is Message:  # which can do without one only if it has tool calls
        schema["required"].append("content")
    for name, field in schema["properties"].items():
        if name not in schema.get("required", []):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
    neutral = getattr(cls, "NEUTRAL", {})
    schema["properties"] |= {name: {"enum": [*values, None]} for name, values in neutral.items()}


def at_most(limit: int) -> Callable[[Any], Any]:
    """Refuses what has more items before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "must have at most {limit} items", {"limit": limit})
        return value

    return check


def listed(value: Any) -> Any:
    """One string as a list of one."""
    return [value] if isinstance(value, str) else value


def joined(content: Any) -> Any:
    """The text of a message that comes in parts."""
    if not isinstance(content, list):
        return content
    for part in at_most(MAX_MESSAGES)(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "must be a text, or a list of parts of type 'text'")
    return "\n".join(part["text"] for part in content)


def prompts(value: Any) -> Any:
    """A text, token ids, or a list of such: always as a list."""
    one = isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list))
    value = [value] if one else value
    if not isinstance(value, list) or not value or not all(isinstance(prompt, str | list) for prompt in value):
        raise PydanticCustomError("prompt", "must be a text, a list of token ids, or a list of such, and not empty")
    return at_most(MAX_SEQUENCES)(value)


MODEL = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, json_schema_extra=documented)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), BeforeValidator(at_most(MAX_TOKENS))]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda prompt: "text" if isinstance(prompt, str) else "ids"),
]
Prompts = Annotated[
    list[Prompt],
    Field(fail_fast=True),
    BeforeValidator(prompts, str | TokenIds | Annotated[list[str | TokenIds], Field(max_length=MAX_SEQUENCES)]),
]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[
    list[StopString],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(listed, StopString | Annotated[list[StopString], Field(max_length=16)]),
]
StopIds = Annotated[list[TokenId], Field(max_length=256), BeforeValidator(at_most(256))]
Bias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    BeforeValidator(at_most(1024)),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Variables = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=1024)] | None],
    Field(max_length=32),
    BeforeValidator(at_most(32)),
]


# --- chats ------------------------------------------------------------------------------------------------------


class TextPart(BaseModel):
    """For the OpenAPI document; `joined` checks."""

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    name: str
    arguments: str  # JSON


class ToolCall(BaseModel):
    """In an answer of the past."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates want the arguments as an object."""
        try:
            arguments = from_json(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(BaseModel):
    model_config = MODEL
    NEUTRAL: ClassVar = {"function_call": (), "audio": (), "refusal": (), "annotations": ([],)}
    tidy = tidied(NEUTRAL)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str, BeforeValidator(joined, str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)])
    ] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128), BeforeValidator(at_most(128))] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_content(self):
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("content", "content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it; "developer" is the newer word for "system"."""
        message = {"role": self.role.replace("developer", "system"), "content": self.content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(at_most(MAX_MESSAGES)),
]


# --- generating -------------------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    model_config = MODEL
    tidy = tidied({})
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in every chunk
    include_obfuscation: bool = False  # random padding against eavesdroppers; never sent


class Sampling(BaseModel):
    """What both ways of generating have in common."""

    model_config = MODEL
    NEUTRAL: ClassVar = NEUTRAL
    tidy = tidied(NEUTRAL, IGNORED)
    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stop: Stop = []
    stop_token_ids: StopIds = []
    min_tokens: int = Field(0, ge=0, lt=2**31)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name for it
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MAX_CHOICES)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Bias = {}
    ignore_eos: bool = False
    cache_salt: str = Field("", max_length=256)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # what the text must be: OpenAI's field, SGLang's, vLLM's, and vLLM's older ones; one of them
    response_format: ResponseFormat | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: AnySchema | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: AnySchema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="after")
    def check_sampling(self):
        if "stream_options" in self.model_fields_set and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        if self.best_of not in (None, self.n):
            raise refused("best_of", "leave it out, or give the value of n")
        return self

    @property
    def unknown(self) -> list[str]:
        """Fields that are ignored."""
        return list(self.model_extra)

    def num_logprobs(self, max_len: int) -> int:
        """Log-probabilities in the answer, at the most. max_len: what the engine has room for."""
        tokens = max_len if self.of_prompt or not self.most_tokens else min(self.most_tokens, max_len)
        return self.num_sequences * tokens * self.logprobs_per_token

    @property
    def of_prompt(self) -> bool:
        """Has the answer log-probabilities of the prompt, too?"""
        return False

    @property
    def logprobs_per_token(self) -> int:
        """The chosen token's and those of the likeliest ones."""
        return 0 if self.num_likeliest is None else 1 + self.num_likeliest

    @property
    def grammars(self) -> list[str]:
        """For the engine: what the text must be."""
        return grammars_of(self)

    @property
    def grammar(self) -> str:
        return only_one(self.grammars)

    def params(self, **more) -> RequestParams:
        if (grammar := self.grammar) and (self.min_tokens or self.ignore_eos):
            field = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ApiError(400, f"{field} contradicts what says where the text ends", field, "invalid_value")
        return RequestParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            logprobs=self.num_likeliest,
            max_tokens=MAX_COUNT if self.most_tokens is None else max(1, self.most_tokens),
            min_tokens=self.min_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            grammar=grammar,
            **more,
        )

    def options(self, **more) -> TextOptions:
        include_stop = self.include_stop_str_in_output or self.no_stop_trim
        return TextOptions(self.stop, self.min_tokens, include_stop, self.skip_special_tokens, **more)


class Function(BaseModel):
    model_config = MODEL
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None  # calls that have to come follow their schema in any case


class Tool(BaseModel):
    model_config = MODEL
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=128), BeforeValidator(at_most(128))] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    _how: ToolFormat = PrivateAttr(FORMATS["hermes"])
    max_tokens: Count | None = None  # None: as many as fit
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: Variables = {}
    separate_reasoning: bool = True  # what stands in <think> is no content

    def calls(self, uids: list[int], max_len: int) -> list[Tokenize]:
        return [
            Tokenize(
                uids,
                messages=[message.for_template() for message in self.messages],
                tools=[tool.model_dump(exclude_none=True) for tool in self.tools if self.tool_choice != "none"],
                variables=self.chat_template_kwargs,
                params=self.params(),
                max_tokens=self.most_tokens,
                max_len=max_len,
                options=self.options(),
            )
        ]

    @property
    def num_sequences(self) -> int:
        return self.n

    @property
    def most_tokens(self) -> int | None:
        """Of the two names for it the newer one counts."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def how(self) -> ToolFormat:
        """The model's way to call tools."""
        return self._how

    def use_format(self, name: str) -> None:
        """The server's to say, not the client's."""
        self._how = FORMATS[name]

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def grammars(self) -> list[str]:
        if self.tool_choice in ("none", "auto"):
            return super().grammars
        named = None if self.tool_choice == "required" else self.tool_choice.function.name
        tools = [tool.function.model_dump() for tool in self.tools if named in (None, tool.function.name)]
        if not tools:
            raise ApiError(
                400, f"tools has no {named or 'function'}, which tool_choice asks for", "tool_choice", "invalid_value"
            )
        calls = calls_grammar(tools, self.how, several=self.parallel_tool_calls and named is None)
        return [*super().grammars, grammar(*calls.split(":", 1))]

    @model_validator(mode="after")
    def check_pairs(self):
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
        return self


class CompletionRequest(Sampling):
    prompt: Prompts
    max_tokens: int = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    def calls(self, uids: list[int], max_len: int) -> list[Tokenize]:
        """uids: n for each prompt."""
        params = self.params(prompt_logprobs=self.logprobs if self.echo else None)
        options = self.options(continues=True, echo=self.echo, only_prompt=self.max_tokens == 0)
        return [
            Tokenize(
                uids[i * self.n : (i + 1) * self.n],
                text=prompt if isinstance(prompt, str) else None,
                token_ids=prompt if isinstance(prompt, list) else None,
                special=self.add_special_tokens,
                params=params,
                max_tokens=max(1, self.max_tokens),
                max_len=max_len,
                options=options,
            )
            for i, prompt in enumerate(self.prompt)
        ]

    @property
    def num_sequences(self) -> int:
        return len(self.prompt) * self.n

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    @property
    def of_prompt(self) -> bool:
        return self.echo

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def check_pairs(self):
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens of 0 needs echo to be true")
        if self.num_sequences > MAX_SEQUENCES:
            raise PydanticCustomError("n", f"prompts times n must be at most {MAX_SEQUENCES}; split the call")
        return self


# --- SGLang's own way of asking ---------------------------------------------------------------------------------

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


class GenerateRequest(BaseModel):
    """SGLang's /generate. What is in `sampling_params` are the fields of a CompletionRequest, some under other names."""

    model_config = MODEL
    NEUTRAL: ClassVar = {
        **dict.fromkeys(("return_logprob", "return_hidden_states", "return_entropy", "background"), (False,)),
        **dict.fromkeys(("image_data", "audio_data", "video_data", "input_embeds", "lora_path", "session_params"), ()),
        "custom_logit_processor": (),
    }
    tidy = tidied(
        NEUTRAL,
        frozenset(
            {"rid", "log_metrics", "no_logs", "priority", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"}
        )
        | {"return_text_in_logprobs", "return_bytes", "extra_key", "data_parallel_rank", "routed_dp_rank"},
    )
    model: str | None = None
    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: Annotated[dict[str, Any], BeforeValidator(at_most(128))] = {}
    stream: bool = False

    @model_validator(mode="after")
    def check_one(self):
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("text", "give text or input_ids, and not both")
        return self

    @property
    def single(self) -> bool:
        """One prompt, and not a list of such."""
        prompt = self.text if self.text is not None else self.input_ids
        return isinstance(prompt, str) or not prompt or not isinstance(prompt[0], str | list)

    def completion(self, model: str) -> CompletionRequest:
        """The same in the words of the other endpoint. ValidationError names the field."""
        fields = {RENAMED.get(name, name): value for name, value in self.sampling_params.items()}
        prompt = self.text if self.text is not None else self.input_ids
        more = {"model": model, "prompt": prompt, "stream": self.stream}
        return CompletionRequest.model_validate({"max_tokens": 128} | fields | more)


# --- texts and tokens -------------------------------------------------------------------------------------------


class TokenizeRequest(BaseModel):
    model_config = MODEL
    tidy = tidied({})
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: Variables = {}
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give prompt or messages, and not both")
        return self

    def call(self, uids: list[int]) -> Tokenize:
        messages = self.messages and [message.for_template() for message in self.messages]
        special, variables = self.add_special_tokens, self.chat_template_kwargs
        return Tokenize(uids, text=self.prompt, messages=messages, variables=variables, special=special)


class DetokenizeRequest(BaseModel):
    model_config = MODEL
    tidy = tidied({})
    model: str | None = None
    tokens: TokenIds
