"""What the processes send to each other: typed, in msgpack. Nothing here can run code when it is decoded.

    API server -> tokenizer -> scheduler -> detokenizer -> API server

and two short cuts: a process that wants a request to end sends Abort to the scheduler, and one that can't serve a request
sends Failed to the API server. A uid is one sequence, given out by the API server; a call with n > 1 has n of them.
"""

from typing import Any

import msgspec
from msgspec import Struct

from stage7_radix.params import RequestParams


class Tokenize(Struct, tag=True):
    """API server -> tokenizer: one call. Exactly one of text, token_ids, messages is given."""

    uids: list[int]
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    special: bool = True  # add the model's own start token to text
    params: RequestParams | None = None  # None: only the ids are wanted (Tokenized)
    stop: list[str] = []
    max_tokens: int | None = None  # None: as many as fit; overrides params
    echo: bool = False
    max_len: int = 0  # what the engine has room for, prompt and output together; the hub fills it in


class Detokenize(Struct, tag=True):
    """API server -> tokenizer; answered by Detokenized."""

    uids: list[int]  # one
    token_ids: list[int]


class Tokenized(Struct, tag=True):
    uid: int
    token_ids: list[int]


class Detokenized(Struct, tag=True):
    uid: int
    text: str


class Generate(Struct, tag=True):
    """Tokenizer -> scheduler: sequences of one prompt."""

    uids: list[int]
    prompt_ids: list[int]
    params: RequestParams
    stop: list[str] = []
    echo: bool = False
    continues: bool = False  # the prompt's text goes on: a space in front belongs to it; an answer begins anew


class Abort(Struct, tag=True):
    """API server or detokenizer -> scheduler: the rest of these is not wanted any more.
    API server -> tokenizer, scheduler -> detokenizer: forget them.
    """

    uids: list[int]


class Started(Struct, tag=True):
    """Scheduler -> detokenizer: a sequence is in the engine; its tokens follow."""

    uid: int
    prompt_tokens: int
    stop: list[str]
    echo_ids: list[int]  # the prompt, if it is part of the answer
    continues: bool = False


class Token(Struct, array_like=True):
    """One token of one sequence. finish_reason is the engine's, with the last."""

    uid: int
    token_id: int
    finish_reason: str | None
    cached_tokens: int  # positions of the prompt that came from the prefix cache
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = []


class Tokens(Struct, tag=True):
    """Scheduler -> detokenizer: all that one step sampled."""

    tokens: list[Token]


class TokenLogprob(Struct, array_like=True):
    text: str
    logprob: float
    data: bytes  # the token's bytes
    shown: bool = True  # they are part of the text; those of special tokens are not


class Piece(Struct, array_like=True):
    """What became certain of one sequence's text. May be empty text, with tokens that are part of a later character.

    The first of a sequence has no tokens: it means that the engine has accepted the request.
    """

    uid: int
    text: str
    num_tokens: int  # new ones, for usage
    finish_reason: str | None  # stop | length | abort; set with the last piece
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[tuple[TokenLogprob, list[TokenLogprob]]] = []  # the chosen token, and the likeliest ones


class Pieces(Struct, tag=True):
    """Detokenizer -> API server."""

    pieces: list[Piece]


class Failed(Struct, tag=True):
    """Any process -> API server: these sequences get no (further) answer, and why. Without uids: why a worker ends."""

    uids: list[int]
    status: int  # HTTP; of a worker, its exit status
    message: str
    worker: str = ""


class EngineStats(Struct, tag=True):
    """Scheduler -> API server, about once a second and whenever it becomes idle."""

    running: int
    waiting: int
    usage: float  # of the KV pool, 0 to 1
    pages_free: int
    pages_total: int
    steps: int
    computed_tokens: int
    output_tokens: int
    retracted: int
    cache_hit_tokens: int
    cache_lookup_tokens: int


class Ready(Struct, tag=True):
    """A worker -> API server: it is up, with facts about the model."""

    worker: str
    incarnation: int
    info: dict[str, Any] = {}


Message = (
    Tokenize
    | Detokenize
    | Tokenized
    | Detokenized
    | Generate
    | Abort
    | Started
    | Tokens
    | Pieces
    | Failed
    | EngineStats
    | Ready
)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
