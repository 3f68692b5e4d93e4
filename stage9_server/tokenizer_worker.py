"""Text to token ids, beside the engine: a slow template or a long text delays no token of other requests."""

import resource
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common.config import UserError
from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.ipc import API, SCHEDULER, Settings, Worker, run_worker
from stage9_server.messages import Abort, Detokenize, Detokenized, Failed, Generate, Message, Tokenize, Tokenized

TIME_LIMIT = 5.0  # seconds for one call; a chat template is a program, and may be an endless one
MAX_BYTES = 1 << 20  # of text in one call: a few seconds' work, for nothing can stop the tokenizer in the middle
MAX_IDS = 1 << 17  # in a call to detokenize: a token can be a hundred bytes
MEMORY = 8 << 30  # bytes that templates and texts may take, beyond what was there before the first call


class Tokenizing:
    """Answers one message at a time. `tokenizer` has the interface of common.tokenizer.Tokenizer."""

    def __init__(self, tokenizer, time_limit: float = TIME_LIMIT):
        self.tokenizer, self.time_limit = tokenizer, time_limit

    def handle(self, message: Tokenize | Detokenize) -> tuple[str, Message]:
        """(receiver, answer). A call that fails, for whatever reason, affects no other call."""
        try:
            with time_limit(self.time_limit):
                if isinstance(message, Detokenize):
                    if len(message.token_ids) > MAX_IDS:
                        raise UserError(f"there are {len(message.token_ids)} tokens, and at most {MAX_IDS} are taken")
                    text = self.tokenizer.decode(message.token_ids, skip_special=False)
                    return API, Detokenized(message.uids[0], text)
                return self.tokenize(message)
        except UserError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the tokenizer or the chat template took longer than {self.time_limit:g} s"
        except Exception as error:  # the template is a program that came with the model, the ids come from the client
            reason = f"the input can't be tokenized: {str(error) or type(error).__name__}"
        return API, Failed(message.uids, 400, reason)

    def tokenize(self, call: Tokenize) -> tuple[str, Message]:
        size = sum(len(text.encode()) for text in self.texts(call))
        if size > MAX_BYTES:
            raise UserError(f"the text has {size} bytes, and at most {MAX_BYTES} are taken; send less, or token ids")
        if call.params is None:
            return API, Tokenized(call.uids[0], self.ids(call))
        if size > call.max_len * self.tokenizer.longest_token:  # not worth the time to count
            raise UserError(too_long(call.max_len, f"more than {call.max_len}"))
        ids = self.ids(call)
        if len(ids) > call.max_len:
            raise UserError(too_long(call.max_len, str(len(ids))))
        tokens = call.max_tokens if call.max_tokens is not None else max(1, call.max_len - len(ids))
        return SCHEDULER, Generate(
            call.uids, ids, replace(call.params, max_tokens=tokens), call.stop, call.echo, call.messages is None
        )

    @staticmethod
    def texts(call: Tokenize) -> list[str]:
        return [text for message in call.messages or [] for text in message.values()] + [call.text or ""]

    def ids(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            return self.tokenizer.chat(call.messages)  # the template writes the start token
        if call.text is not None:
            return self.tokenizer.encode(call.text, special=call.special)
        return call.token_ids


def too_long(limit: int, tokens: str) -> str:
    return (
        f"This model's maximum context length is {limit} tokens, but the prompt has {tokens} tokens. "
        "Please reduce the length of the prompt."
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds of Python. Code that Python can't interrupt ends the process soon after: SIGVTALRM,
    which is handled nowhere.
    """

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 4 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: int) -> None:
    """A template that fills the memory gets a MemoryError, before the machine is in need."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit, hard = pages * resource.getpagesize() + more, resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


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
    tokenizing = Tokenizing(load_tokenizer(settings.engine.model) or ByteTokenizer())
    Tokenizing(tokenizing.tokenizer, 60).handle(
        Tokenize([0], messages=[{"role": "user", "content": ""}])
    )  # loads Jinja
    limit_memory(MEMORY)
    serve(tokenizing, worker)


if __name__ == "__main__":
    run_worker(main)
