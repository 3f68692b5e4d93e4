"""Text to token ids, beside the engine: a slow template or a long text delays no token of other requests."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from common.config import UserError
from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.guard.process import run_worker
from stage9_server.guard.texts import NoTextLimits, TextLimits
from stage9_server.ipc import API, SCHEDULER, Settings, Worker
from stage9_server.messages import Abort, Detokenize, Detokenized, Failed, Generate, Message, Tokenize, Tokenized

FIRST = Tokenize([0], messages=[{"role": "user", "content": ""}])  # loads Jinja


class Tokenizing:
    """Answers one message at a time. `tokenizer` has the interface of common.tokenizer.Tokenizer."""

    def __init__(self, tokenizer, limits: TextLimits | NoTextLimits):
        self.tokenizer, self.limits = tokenizer, limits

    def handle(self, message: Tokenize | Detokenize) -> tuple[str, Message]:
        """(receiver, answer). A call that fails, for whatever reason, affects no other call."""
        try:
            with self.limits.watch():
                if isinstance(message, Tokenize):
                    return self.tokenize(message)
                self.limits.check(message, 0)
                return API, Detokenized(message.uids[0], self.tokenizer.decode(message.token_ids, skip_special=False))
        except (UserError, TimeoutError) as error:
            reason = str(error)
        except Exception as error:  # the template is a program that came with the model, the ids come from the client
            reason = f"the input can't be tokenized: {str(error) or type(error).__name__}"
        return API, Failed(message.uids, 400, reason)

    def tokenize(self, call: Tokenize) -> tuple[str, Message]:
        size = sum(len(text.encode()) for text in texts([call.text, call.messages, call.variables]))
        self.limits.check(call, size)
        if call.params is None:
            return API, Tokenized(call.uids[0], self.ids(call))
        if size > call.max_len * self.tokenizer.longest_token:  # not worth the time to count
            raise UserError(too_long(call.max_len, f"more than {call.max_len}"))
        ids = self.ids(call)
        if len(ids) > call.max_len:
            raise UserError(too_long(call.max_len, str(len(ids))))
        tokens = call.max_tokens if call.max_tokens is not None else max(1, call.max_len - len(ids))
        thinking = self.tokenizer.thinking(ids) if call.messages is not None else None
        options = msgspec.structs.replace(call.options, thinking=thinking)
        return SCHEDULER, Generate(call.uids, ids, replace(call.params, max_tokens=tokens), options)

    def ids(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            return self.tokenizer.chat(call.messages, call.variables)  # the template writes the start token
        if call.text is not None:
            return self.tokenizer.encode(call.text, special=call.special)
        return call.token_ids


def texts(value: Any) -> Iterator[str]:
    """All strings in there."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def too_long(limit: int, tokens: str) -> str:
    return (
        f"This model's maximum context length is {limit} tokens, but the prompt has {tokens} tokens. "
        "Please reduce the length of the prompt."
    )


def sort_in(queue: deque[Tokenize | Detokenize], messages: Iterable[Tokenize | Detokenize | Abort]) -> None:
    """Calls go to the end of the queue; aborts take those out that are still there."""
    for message in messages:
        if not isinstance(message, Abort):
            queue.append(message)
            continue
        gone, calls = set(message.uids), list(queue)
        queue.clear()
        for call in calls:
            call.uids = [uid for uid in call.uids if uid not in gone]
            if call.uids:
                queue.append(call)


def serve(tokenizing: Tokenizing, worker: Worker) -> None:
    """One call at a time, so that an abort finds those that have not begun."""
    worker.ready()
    queue: deque[Tokenize | Detokenize] = deque()
    while True:
        sort_in(queue, worker.receive(wait=not queue))
        if queue:
            worker.send(*tokenizing.handle(queue.popleft()))


def main(settings: Settings) -> None:
    worker = Worker(settings)
    tokenizer = load_tokenizer(settings.engine.model) or ByteTokenizer()
    Tokenizing(tokenizer, NoTextLimits()).handle(FIRST)
    limits = TextLimits() if settings.guard else NoTextLimits()
    limits.begin()
    serve(Tokenizing(tokenizer, limits), worker)


if __name__ == "__main__":
    run_worker(main)
