"""What texts and chat templates may cost the tokenizer. Without it an endless template stops the tokenizer for ever, and one
that fills the memory takes the machine along. A template is a program that came with the model."""

import resource
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from common.config import UserError
from stage9_server.messages import Abort, Detokenize, Tokenize

TIME_LIMIT = 5.0  # seconds for one call
MAX_BYTES = 1 << 20  # of text in one call: a few seconds' work, for nothing can stop the tokenizer in the middle
MAX_IDS = 1 << 17  # in a call to detokenize: a token can be a hundred bytes
MEMORY = 8 << 30  # bytes that templates and texts may take, beyond what was there before the first call


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


class NoTextLimits:
    """The null form."""

    def begin(self) -> None:
        """Before the first call."""

    def check(self, message: Tokenize | Detokenize, longest_token: int) -> None:
        """longest_token: bytes, at most. UserError for what is too large."""

    def watch(self):
        """Around the work for one call. TimeoutError if it takes too long."""
        return nullcontext()


class TextLimits:
    def __init__(self, seconds: float = TIME_LIMIT, memory: int = MEMORY):
        self.seconds, self.memory = seconds, memory

    def begin(self) -> None:
        limit_memory(self.memory)

    def check(self, message: Tokenize | Detokenize, longest_token: int) -> None:
        if isinstance(message, Detokenize):
            if len(message.token_ids) > MAX_IDS:
                raise UserError(f"there are {len(message.token_ids)} tokens, and at most {MAX_IDS} are taken")
            return
        size = sum(
            len(text.encode()) for text in texts([message.text, message.messages, message.variables, message.tools])
        )
        if size > MAX_BYTES:
            raise UserError(f"the text has {size} bytes, and at most {MAX_BYTES} are taken; send less, or token ids")
        if message.params and size > message.max_len * longest_token:  # not worth the time to count
            raise UserError(too_long(message.max_len, f"more than {message.max_len}"))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Code that Python can't interrupt ends the process soon after: SIGVTALRM, which is handled nowhere."""

        def give_up(*_):
            raise TimeoutError(f"the tokenizer or the chat template took longer than {self.seconds:g} s")

        before = signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, 4 * self.seconds)
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
    """Calls go to the end of the queue; aborts take those out that are still there: a client that has left costs nothing."""
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
