"""What the processes send to each other: typed, in msgpack. Nothing here can run code when it is decoded.

    API server -> tokenizer -> scheduler -> detokenizer -> API server

That is one message per process on the way to a sequence's first token, and two per step after it. Besides, the scheduler tells
the API server what it has accepted, whoever wants a sequence to end tells the scheduler, and whoever can't serve one sends
Failed to the API server. A uid is one sequence, given out by the API server; a call with n > 1 has n of them.
"""

from typing import Any

import msgspec
from msgspec import Struct

from stage7_radix.params import RequestParams
from stage9_server.inspector.messages import Inspect, Inspected


class TextOptions(Struct, frozen=True):
    """How a sequence's tokens become its text. Made by the API server, used by the detokenizer."""

    stop: list[str] = []  # strings
    min_tokens: int = 0  # before which they are not looked for
    include_stop: bool = False  # what ends a text is part of it: the stop string, or the end token
    skip_special: bool = True  # special tokens are not shown
    continues: bool = False  # the prompt's text goes on: a space in front belongs to it; an answer begins anew
    echo: bool = False  # the prompt comes first
    only_prompt: bool = False  # and nothing else: the one token that is generated is dropped
    thinking: bool | None = None  # does the prompt end inside <think>? None: the template knows none; the tokenizer's


class Tokenize(Struct, tag=True):
    """API server -> tokenizer: one call. Exactly one of text, token_ids, messages is given."""

    uids: list[int]
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}  # for the chat template, beside the messages
    tools: list[dict[str, Any]] = []  # likewise
    special: bool = True  # add the model's own start token to text
    params: RequestParams | None = None  # None: only the ids are wanted (Tokenized)
    max_tokens: int | None = None  # None: as many as fit; overrides params
    max_len: int = 0  # what the engine has room for, prompt and output together
    options: TextOptions = TextOptions()


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
    options: TextOptions = TextOptions()


class Accepted(Struct, tag=True):
    """Scheduler -> API server: the engine has them. So a client can be told that it will get an answer."""

    uids: list[int]


class Abort(Struct, tag=True):
    """API server -> scheduler, tokenizer: these are not wanted any more. Scheduler -> detokenizer: forget them."""

    uids: list[int]


class Stopped(Struct, tag=True):
    """Detokenizer -> scheduler: these have ended, by a stop string, of which the engine knows nothing."""

    uids: list[int]


class Started(Struct):
    """What the detokenizer has to know of a sequence; comes with its first token."""

    uid: int
    prompt_tokens: int
    options: TextOptions = TextOptions()
    echo_ids: list[int] = []  # the prompt, if it is part of the answer
    queue_seconds: float | None = None  # from its arrival at the engine to its admission


class Token(Struct, array_like=True):
    """One token of one sequence. finish_reason is the engine's, with the last."""

    uid: int
    token_id: int
    finish_reason: str | None
    cached_tokens: int  # positions of the prompt that came from the prefix cache
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = []
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]] | None] = []  # with the first, where asked for


class Tokens(Struct, tag=True):
    """Scheduler -> detokenizer: all that one step sampled, and the sequences whose first token is among it."""

    tokens: list[Token]
    started: list[Started] = []


class TokenLogprob(Struct, array_like=True):
    text: str
    logprob: float | None  # None: of a prompt's first token, before which there is nothing
    data: bytes  # the token's bytes
    shown: bool = True  # they are part of the text; those of special tokens are not


class Piece(Struct, array_like=True):
    """What became certain of one sequence's text. May be empty text, with tokens that are part of a later character."""

    uid: int
    text: str
    token_ids: list[int]  # new ones
    finish_reason: str | None  # stop | length | abort; set with the last piece
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[tuple[TokenLogprob, list[TokenLogprob]]] = []  # the chosen token, and the likeliest ones
    thinking: bool | None = None  # TextOptions.thinking
    queue_seconds: float | None = None  # with the first


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
    free_pages: int
    num_pages: int
    steps: int
    computed_tokens: int
    output_tokens: int
    retracted: int
    hit_tokens: int  # of prompts, found in the prefix cache
    prompt_tokens: int  # that were looked for there


class Ready(Struct, tag=True):
    """A worker -> API server: it is up, with facts about the model."""

    worker: str
    incarnation: int
    info: dict[str, Any] = {}


def merged(pieces: list[Piece]) -> list[Piece]:
    """One piece for each sequence: what has come together is handed on together."""
    groups: dict[int, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.uid, []).append(piece)
    return [same[0] if len(same) == 1 else joined(same) for same in groups.values()]


def joined(pieces: list[Piece]) -> Piece:
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        queue_seconds=pieces[0].queue_seconds,
    )


Message = (
    Tokenize | Detokenize | Tokenized | Detokenized | Generate | Accepted | Abort | Stopped | Tokens | Pieces | Failed | EngineStats | Ready | Inspect | Inspected
)  # fmt: skip
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
