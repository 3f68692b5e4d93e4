"""Answers, put together from pieces: as a whole, or event by event. That is done for every token, so without a model: the head
and the tail of an event are bytes that are made once per call.
"""

import asyncio
import codecs
import time
from collections.abc import Iterator
from functools import cached_property

import msgspec

from stage9_server.messages import Piece, TokenLogprob
from stage9_server.openai_api.reasoning import Plain, Thinking
from stage9_server.openai_api.requests import ChatRequest, Sampling
from stage9_server.openai_api.tools import Then, ToolCalls

MAX_TEXTS = 1024  # pieces of an answer; a string of four letters takes the memory of fifty
DONE = b"data: [DONE]\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
encode = msgspec.json.Encoder().encode


def token_name(token: TokenLogprob) -> str:
    """Its text, or its bytes if they are part of a character, as OpenAI writes them."""
    if token.text.encode() == token.data:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


class Choice:
    """One sequence: its totals, and what has come and is not yet sent."""

    def __init__(self, index: int):
        self.index, self.texts, self.logprobs, self.token_ids = index, [], [], []
        self.finish_reason: str | None = None
        self.prompt_tokens = self.cached_tokens = self.num_tokens = 0
        self.parser: Plain | Thinking | Then | None = None  # of a stream, from its first piece on
        self.thinking: bool | None = None
        self.called = False  # does it call a tool?
        self.length, self.decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def count(self, piece: Piece) -> None:
        self.num_tokens += len(piece.token_ids)
        self.prompt_tokens, self.cached_tokens = piece.prompt_tokens, piece.cached_tokens
        self.finish_reason, self.thinking = piece.finish_reason, piece.thinking

    def keep(self, piece: Piece) -> None:
        if piece.text:
            self.texts.append(piece.text)
            if len(self.texts) > MAX_TEXTS:
                self.texts = ["".join(self.texts)]
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids

    def offset(self, token: TokenLogprob) -> int:
        """Where in the text the token starts, or the character that it is part of. Ask in order."""
        start = self.length
        if token.shown:
            self.length += len(self.decoder.decode(token.data))
        return start


class Answer:
    """The answer to one call. What differs between the endpoints is in the classes below."""

    prefix = whole_name = chunk_name = ""

    def __init__(self, ask: Sampling, uids: list[int], request_id: str):
        """uids: n for each prompt, prompt after prompt."""
        self.ask, self.id = ask, self.prefix + request_id
        self.choices = {uid: Choice(index) for index, uid in enumerate(uids)}
        self.started_at = time.time()
        self.head = {"id": self.id, "object": self.whole_name, "created": int(self.started_at), "model": ask.model}
        self.chunk_tail = b'],"usage":null}\n\n' if ask.stream_options.include_usage else b"]}\n\n"
        self.num_open = len(uids)

    @cached_property
    def chunk_head(self) -> bytes:
        return b"data: " + encode(self.head | {"object": self.chunk_name})[:-1] + b',"choices":['

    def add(self, pieces: list[Piece]) -> None:
        """For `whole`."""
        for piece in pieces:
            self.choices[piece.uid].count(piece)
            self.choices[piece.uid].keep(piece)

    def events(self, pieces: list[Piece]) -> bytes:
        """Server-sent events of what these bring, and behind the last piece of all the end of the stream."""
        out, head = [], self.chunk_head
        for piece in pieces:
            choice = self.choices[piece.uid]
            choice.count(piece)
            for content in self.contents(choice, piece):
                out += (head, content, self.tail())
            self.num_open -= piece.finish_reason is not None
        if not self.num_open:
            out.append(self.ending())
        return b"".join(out)

    def tail(self) -> bytes:
        """Behind the choices of a chunk."""
        if self.ask.stream_options.continuous_usage_stats:
            return b'],"usage":' + encode(self.usage()) + b"}\n\n"
        return self.chunk_tail

    def ending(self) -> bytes:
        if not self.ask.stream_options.include_usage:
            return DONE
        chunk = self.head | {"object": self.chunk_name, "choices": [], "usage": self.usage()}
        return b"data: " + encode(chunk) + b"\n\n" + DONE

    @staticmethod
    def reason(choice: Choice) -> str | None:
        """Why it ended. Asked once its message is made."""
        return choice.finish_reason

    def usage(self) -> dict:
        """A prompt counts once, however many choices it has; what they found in the cache is what was there before."""
        choices, n = list(self.choices.values()), self.ask.n
        groups = [choices[i : i + n] for i in range(0, len(choices), n)]
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
                **self.message(choice),
                "logprobs": None if self.ask.num_likeliest is None else self.logprobs(choice, choice.logprobs),
                "finish_reason": self.reason(choice),
            }
            choices.append(msgspec.Raw(encode(content)))
            choice.texts, choice.logprobs = [], []
            await asyncio.sleep(0)
        return encode(self.head | {"choices": choices, "usage": self.usage()})


def chunk(choice: Choice, content: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (choice.index, content, logprobs, reason)


class ChatAnswer(Answer):
    """/v1/chat/completions"""

    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    ask: ChatRequest

    def parser(self, thinking: bool | None) -> Plain | Thinking | Then:
        """A grammar leaves no room for thoughts."""
        plain = thinking is None or not self.ask.separate_reasoning or bool(self.ask.grammar)
        first = Plain() if plain else Thinking(thinking)
        return Then(first, ToolCalls(self.ask.how)) if self.ask.may_call else first

    def contents(self, choice: Choice, piece: Piece) -> Iterator[bytes]:
        if choice.parser is None:
            choice.parser = self.parser(piece.thinking)
            yield chunk(choice, b'"delta":{"role":"assistant","content":"","refusal":null}')
        delta = choice.parser.push(piece.text, piece.finish_reason is not None)
        if piece.logprobs:
            delta = delta or {"content": ""}
        choice.called |= "tool_calls" in delta
        if delta:
            logprobs = encode(self.logprobs(choice, piece.logprobs)) if piece.logprobs else b"null"
            yield chunk(choice, b'"delta":' + encode(delta), logprobs)
        if piece.finish_reason:
            yield chunk(choice, b'"delta":{}', reason=encode(self.reason(choice)))

    def message(self, choice: Choice) -> dict:
        parts = self.parser(choice.thinking).push("".join(choice.texts), last=True)
        message = {"role": "assistant", "content": None if "tool_calls" in parts else "", "refusal": None} | parts
        if "tool_calls" in parts:
            choice.called = True
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in parts["tool_calls"]]
        return {"message": message}

    @staticmethod
    def reason(choice: Choice) -> str | None:
        return "tool_calls" if choice.called and choice.finish_reason == "stop" else choice.finish_reason

    def logprobs(self, choice: Choice, entries: list) -> dict:
        """Token by token as JSON, which takes a tenth of the memory that dicts do."""

        def entry(token: TokenLogprob) -> dict:
            return {"token": token_name(token), "logprob": token.logprob, "bytes": list(token.data)}

        tokens = (entry(token) | {"top_logprobs": [entry(t) for t in top]} for token, top in entries)
        return {"content": [msgspec.Raw(encode(token)) for token in tokens], "refusal": None}


class TextAnswer(Answer):
    """/v1/completions"""

    prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def contents(self, choice: Choice, piece: Piece) -> Iterator[bytes]:
        if piece.text or piece.logprobs:
            logprobs = encode(self.logprobs(choice, piece.logprobs)) if piece.logprobs else b"null"
            yield chunk(choice, b'"text":' + encode(piece.text), logprobs)
        if piece.finish_reason:
            yield chunk(choice, b'"text":""', reason=encode(piece.finish_reason))

    def message(self, choice: Choice) -> dict:
        return {"text": "".join(choice.texts)}

    def logprobs(self, choice: Choice, entries: list) -> dict:
        def likeliest(token: TokenLogprob, top: list[TokenLogprob]) -> dict | None:
            return None if token.logprob is None else {token_name(t): t.logprob for t in (token, *top)}

        return {
            "tokens": [token_name(token) for token, _ in entries],
            "token_logprobs": [token.logprob for token, _ in entries],
            "top_logprobs": [msgspec.Raw(encode(likeliest(*entry))) for entry in entries],
            "text_offset": [choice.offset(token) for token, _ in entries],
        }


class GenerateAnswer(Answer):
    """SGLang's /generate: one object, or a list of such; an event repeats the text from its beginning."""

    single = True  # the call has one prompt, and not a list of one

    def events(self, pieces: list[Piece]) -> bytes:
        self.add(pieces)
        self.num_open -= sum(piece.finish_reason is not None for piece in pieces)
        objects = (self.object(self.choices[piece.uid]) for piece in pieces)
        return b"".join(b"data: " + encode(each) + b"\n\n" for each in objects) + (b"" if self.num_open else DONE)

    def object(self, choice: Choice) -> dict:
        reason = choice.finish_reason and {"type": choice.finish_reason}
        meta = {
            "id": self.id,
            "finish_reason": reason,
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.cached_tokens,
            "e2e_latency": time.time() - self.started_at,
        }
        found = {"text": "".join(choice.texts), "output_ids": choice.token_ids, "meta_info": meta}
        return found if len(self.choices) == 1 else found | {"index": choice.index}

    async def whole(self) -> bytes:
        objects = [self.object(choice) for choice in self.choices.values()]
        return encode(objects[0] if self.single and len(objects) == 1 else objects)
