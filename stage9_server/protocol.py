"""What clients send and receive: OpenAI's requests, checked, and its answers, as bytes.

A request is a pydantic model, strict about types and ranges. A field is honoured (the models), accepted without effect
(IGNORED) or refused unless its value turns the feature off (REFUSED); any other is unknown and refused too. Answers are
put together by `Answer`, from pieces, without a model: that is done for every token.
"""

import asyncio
import codecs
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from stage2_req.params import MAX_LOGPROBS
from stage7_radix.params import RequestParams
from stage9_server.messages import Piece, Tokenize, TokenLogprob

KEY_VARIABLE = "SGLANG_ZERO_KEY"  # of the environment: the key that a server asks for, and that a client gives
MAX_CHOICES, MAX_SEQUENCES = 16, 256  # n, and prompts times n in one call
MAX_MESSAGES = 2048  # of a chat, and parts of a message
MAX_TOKENS = 1 << 20  # of one prompt
MAX_TEXTS = 1024  # pieces of an answer; a string of four letters takes the memory of fifty

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
# name -> the values, besides null, that ask for nothing
REFUSED = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "suffix": ("",),
}
REFUSED_IN_MESSAGES = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": (), "annotations": ([],)}

encode = msgspec.json.Encoder().encode
T = TypeVar("T", bound=BaseModel)


class ApiError(Exception):
    """An answer that is an error. `param` names the field, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return encode({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


# --- requests ---------------------------------------------------------------------------------------------------


def asked(
    fields: Any, known: Iterable[str], refused: Mapping[str, tuple] = REFUSED, ignored: frozenset[str] = IGNORED
) -> Any:
    """A JSON object without what is null, ignored, or refused and off; of the unknown only the first, to be named.

    ApiError for what is refused and on.
    """
    if not isinstance(fields, dict):
        return fields
    for name, values in refused.items():
        if (value := fields.get(name)) is not None and value not in values:
            raise ApiError(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
    names = {*known, *ignored, *refused}
    unknown = [name for name, value in fields.items() if value is not None and name not in names][:1]
    return {name: fields[name] for name in [*known, *unknown] if fields.get(name) is not None}


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


STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), BeforeValidator(at_most(MAX_TOKENS))]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda prompt: "text" if isinstance(prompt, str) else "ids"),
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


class TextPart(BaseModel):
    """For the OpenAPI document; `joined` checks."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(joined, str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)])]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it; "developer" is the newer word for "system"."""
        message = {"role": self.role.replace("developer", "system"), "content": self.content}
        return message | ({"name": self.name} if self.name else {})


Asked = BeforeValidator(
    partial(asked, known=Message.model_fields, refused=REFUSED_IN_MESSAGES, ignored=frozenset()), Message
)
Messages = Annotated[
    list[Annotated[Message, Asked]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(at_most(MAX_MESSAGES)),
]


class StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool = False
    include_obfuscation: bool = False  # random padding against eavesdroppers; never sent


NoNulls = BeforeValidator(
    partial(asked, known=StreamOptions.model_fields, refused={}, ignored=frozenset()), StreamOptions
)


class Sampling(BaseModel):
    """What both ways of generating have in common."""

    model_config = STRICT
    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stop = []
    stop_token_ids: StopIds = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MAX_CHOICES)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Bias = {}
    ignore_eos: bool = False
    cache_salt: str = Field("", max_length=256)
    stream: bool = False
    stream_options: Annotated[StreamOptions, NoNulls] | None = None

    @model_validator(mode="after")
    def check_stream_options(self):
        if self.stream_options and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def num_logprobs(self, max_len: int) -> int:
        """Log-probabilities in the answer, at the most. max_len: what the engine has room for."""
        return self.num_sequences * min(self.most_tokens or max_len, max_len) * self.logprobs_per_token

    @property
    def logprobs_per_token(self) -> int:
        """The chosen token's and those of the likeliest ones."""
        return 0 if self.num_likeliest is None else 1 + self.num_likeliest

    def params(self) -> RequestParams:
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
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
        )


class ChatRequest(Sampling):
    messages: Messages
    max_tokens: Count | None = None  # None: as many as fit
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    def calls(self, uids: list[int]) -> list[Tokenize]:
        return [
            Tokenize(
                uids,
                messages=[message.for_template() for message in self.messages],
                params=self.params(),
                stop=self.stop,
                max_tokens=self.most_tokens,
            )
        ]

    @property
    def num_sequences(self) -> int:
        return self.n

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def num_likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def check_pairs(self):
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.max_tokens and self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "give max_tokens or max_completion_tokens, not both")
        return self


class CompletionRequest(Sampling):
    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(prompts, str | TokenIds | Annotated[list[str | TokenIds], Field(max_length=MAX_SEQUENCES)]),
    ]
    max_tokens: Count = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    def calls(self, uids: list[int]) -> list[Tokenize]:
        """uids: n for each prompt."""
        params = self.params()
        return [
            Tokenize(
                uids[i * self.n : (i + 1) * self.n],
                text=prompt if isinstance(prompt, str) else None,
                token_ids=prompt if isinstance(prompt, list) else None,
                params=params,
                stop=self.stop,
                max_tokens=self.max_tokens,
                echo=self.echo,
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
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def check_pairs(self):
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "best_of is not supported beyond n; leave it out")
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported: the prompt has none")
        if self.num_sequences > MAX_SEQUENCES:
            raise PydanticCustomError("n", f"prompts times n must be at most {MAX_SEQUENCES}; split the call")
        return self


class TokenizeRequest(BaseModel):
    model_config = STRICT
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give prompt or messages, and not both")
        return self


class DetokenizeRequest(BaseModel):
    model_config = STRICT
    model: str | None = None
    tokens: TokenIds


def parse(kind: type[T], body: bytes) -> T:
    """The request in a body. ApiError names the field and what is wrong with it."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(asked(fields, kind.model_fields))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:  # of the request as a whole; the type names the field
        raise ApiError(400, first["msg"], first["type"], "invalid_value")
    param = ".".join(map(str, first["loc"]))[:100]
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"{param} is no known parameter; leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        raise ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    raise ApiError(400, f"{param}: {first['msg']}", param, "invalid_value")


# --- answers ----------------------------------------------------------------------------------------------------


def token_name(token: TokenLogprob) -> str:
    """Its text, or its bytes if they are part of a character, as OpenAI writes them."""
    if token.text.encode() == token.data:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


class ChatForm:
    """How /v1/chat/completions words a choice."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    opening = b'"delta":{"role":"assistant","content":"","refusal":null}'
    text = b'"delta":{"content":%b}'
    closing = b'"delta":{}'

    @staticmethod
    def choice(text: str) -> dict:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    @staticmethod
    def logprobs(choice: "Choice") -> dict:
        """Token by token as JSON, which takes a tenth of the memory that dicts do."""

        def entry(token: TokenLogprob) -> dict:
            return {"token": token_name(token), "logprob": token.logprob, "bytes": list(token.data)}

        tokens = (entry(token) | {"top_logprobs": [entry(t) for t in top]} for token, top in choice.logprobs)
        return {"content": [msgspec.Raw(encode(token)) for token in tokens], "refusal": None}


class TextForm:
    """How /v1/completions words a choice."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"
    opening = None
    text = b'"text":%b'
    closing = b'"text":""'

    @staticmethod
    def choice(text: str) -> dict:
        return {"text": text}

    @staticmethod
    def logprobs(choice: "Choice") -> dict:
        tokens = [token for token, _ in choice.logprobs]
        likeliest = ({token_name(t): t.logprob for t in (token, *top)} for token, top in choice.logprobs)
        return {
            "tokens": [token_name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [msgspec.Raw(encode(entries)) for entries in likeliest],
            "text_offset": [choice.offset(token) for token in tokens],
        }


Form = type[ChatForm] | type[TextForm]


class Choice:
    """One sequence: its totals, and what has come and is not yet sent."""

    def __init__(self, index: int):
        self.index, self.texts, self.logprobs = index, [], []
        self.accepted = self.opened = False
        self.finish_reason: str | None = None
        self.prompt_tokens = self.cached_tokens = self.num_tokens = 0
        self.length, self.decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: Piece) -> None:
        self.accepted = True
        if piece.text:
            self.texts.append(piece.text)
            if len(self.texts) > MAX_TEXTS:
                self.texts = ["".join(self.texts)]
        if piece.logprobs:
            self.logprobs += piece.logprobs
        self.num_tokens += piece.num_tokens
        self.prompt_tokens, self.cached_tokens = piece.prompt_tokens, piece.cached_tokens
        self.finish_reason = piece.finish_reason

    def offset(self, token: TokenLogprob) -> int:
        """Where in the text the token starts, or the character that it is part of. Ask in order."""
        start = self.length
        if token.shown:
            self.length += len(self.decoder.decode(token.data))
        return start


class Answer:
    """The answer to one call, from its pieces: as a whole, or event by event."""

    def __init__(self, form: Form, model: str, uids: list[int], n: int, *, logprobs: bool, include_usage: bool):
        """uids: n for each prompt, prompt after prompt."""
        self.form, self.n, self.wants_logprobs, self.include_usage = form, n, logprobs, include_usage
        self.head = {"id": form.prefix + uuid.uuid4().hex, "object": form.whole, "created": int(time.time())}
        self.head["model"] = model
        self.choices = {uid: Choice(index) for index, uid in enumerate(uids)}
        self.num_open = len(uids)
        self.chunk_head = b"data: " + encode(self.head | {"object": form.chunk})[:-1] + b',"choices":['
        self.chunk_tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @property
    def accepted(self) -> bool:
        """Has the engine taken all of it?"""
        return all(choice.accepted for choice in self.choices.values())

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.choices[piece.uid].add(piece)
            self.num_open -= piece.finish_reason is not None

    def usage(self) -> dict:
        """A prompt counts once, however many choices it has; what they found in the cache is what was there before."""
        choices = list(self.choices.values())
        groups = [choices[i : i + self.n] for i in range(0, len(choices), self.n)]
        prompt = sum(group[0].prompt_tokens for group in groups)
        completion = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(min(c.cached_tokens for c in group) for group in groups)},
        }

    async def whole(self) -> bytes:
        """Choice by choice: with log-probabilities one may be megabytes, and others want to be served. What is encoded is
        not kept.
        """
        choices = []
        for choice in self.choices.values():
            content = {
                "index": choice.index,
                **self.form.choice("".join(choice.texts)),
                "logprobs": self.form.logprobs(choice) if self.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            choices.append(msgspec.Raw(encode(content)))
            choice.texts, choice.logprobs = [], []
            await asyncio.sleep(0)
        return encode(self.head | {"choices": choices, "usage": self.usage()})

    def events(self, uids: Iterable[int]) -> bytes:
        """What is new of these sequences, as server-sent events; several tokens that came together are one event."""
        out = []
        for uid in uids:
            choice = self.choices[uid]
            if not choice.opened:
                choice.opened = True
                if self.form.opening:
                    self.event(out, choice, self.form.opening)
            if choice.texts or choice.logprobs:
                logprobs = encode(self.form.logprobs(choice)) if choice.logprobs else b"null"
                self.event(out, choice, self.form.text % encode("".join(choice.texts)), logprobs)
                choice.texts, choice.logprobs = [], []
            if choice.finish_reason:
                self.event(out, choice, self.form.closing, reason=encode(choice.finish_reason))
        return b"".join(out)

    def event(self, out: list, choice: Choice, content: bytes, logprobs: bytes = b"null", reason: bytes = b"null"):
        body = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (choice.index, content, logprobs, reason)
        out += (self.chunk_head, body, self.chunk_tail)

    def ending(self) -> bytes:
        """What follows the last piece."""
        done = b"data: [DONE]\n\n"
        if not self.include_usage:
            return done
        chunk = self.head | {"object": self.form.chunk, "choices": [], "usage": self.usage()}
        return b"data: " + encode(chunk) + b"\n\n" + done
