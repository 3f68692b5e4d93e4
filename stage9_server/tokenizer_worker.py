"""Text to token ids, beside the engine: a slow template or a long text delays no token of other requests."""

from collections import deque
from dataclasses import replace

import msgspec

from common.config import UserError
from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.guard.process import run_worker
from stage9_server.guard.texts import NoTextLimits, TextLimits, sort_in, too_long
from stage9_server.ipc import API, SCHEDULER, Settings, Worker
from stage9_server.messages import Detokenize, Detokenized, Failed, Generate, Message, Tokenize, Tokenized
from stage9_server.openai_api.tools import format_of, in_words

FIRST = Tokenize([0], messages=[{"role": "user", "content": ""}])  # loads Jinja


class Tokenizing:
    """Answers one message at a time. `tokenizer` has the interface of common.tokenizer.Tokenizer."""

    def __init__(self, tokenizer, limits: TextLimits | NoTextLimits):
        self.tokenizer, self.limits = tokenizer, limits
        self.tool_format = format_of(tokenizer.template)

    def handle(self, message: Tokenize | Detokenize) -> tuple[str, Message]:
        """(receiver, answer). A call that fails, for whatever reason, affects no other call."""
        try:
            with self.limits.watch():
                self.limits.check(message, self.tokenizer.longest_token)
                if isinstance(message, Tokenize):
                    return self.tokenize(message)
                return API, Detokenized(message.uids[0], self.tokenizer.decode(message.token_ids, skip_special=False))
        except (UserError, TimeoutError) as error:
            reason = str(error)
        except Exception as error:  # the template is a program that came with the model, the ids come from the client
            reason = f"the input can't be tokenized: {str(error) or type(error).__name__}"
        return API, Failed(message.uids, 400, reason)

    def tokenize(self, call: Tokenize) -> tuple[str, Message]:
        ids = self.ids(call)
        if call.params is None:
            return API, Tokenized(call.uids[0], ids)
        if len(ids) > call.max_len:
            raise UserError(too_long(call.max_len, str(len(ids))))
        tokens = call.max_tokens if call.max_tokens is not None else max(1, call.max_len - len(ids))
        thinking = self.tokenizer.thinking(ids) if call.messages is not None else None
        options = msgspec.structs.replace(call.options, thinking=thinking)
        params = call.params if call.params.max_tokens == tokens else replace(call.params, max_tokens=tokens)
        return SCHEDULER, Generate(call.uids, ids, params, options)

    def ids(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            messages = in_words(call.messages, call.tools, None if self.tokenizer.knows_tools else self.tool_format)
            return self.tokenizer.chat(messages, call.variables, call.tools)  # the template writes the start token
        if call.text is not None:
            return self.tokenizer.encode(call.text, special=call.special)
        return call.token_ids


def serve(tokenizing: Tokenizing, worker: Worker) -> None:
    """One call at a time, so that an abort finds those that have not begun."""
    worker.ready(tool_format=tokenizing.tool_format)
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
