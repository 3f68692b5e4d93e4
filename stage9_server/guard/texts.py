"""What texts and chat templates may cost the tokenizer. Without it an endless template stops the tokenizer for ever, and one
that fills the memory takes the machine along. A template is a program that came with the model."""

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from common.config import UserError
from stage9_server.messages import Detokenize, Tokenize

TIME_LIMIT = 5.0  # seconds for one call
MAX_BYTES = 1 << 20  # of text in one call: a few seconds' work, for nothing can stop the tokenizer in the middle
MAX_IDS = 1 << 17  # in a call to detokenize: a token can be a hundred bytes
MEMORY = 8 << 30  # bytes that templates and texts may take, beyond what was there before the first call


class NoTextLimits:
    """The null form."""

    def begin(self) -> None:
        """Before the first call."""

    def check(self, message: Tokenize | Detokenize, size: int) -> None:
        """size: bytes of text. UserError for what is too large."""

    def watch(self):
        """Around the work for one call. TimeoutError if it takes too long."""
        return nullcontext()


class TextLimits:
    def __init__(self, seconds: float = TIME_LIMIT, memory: int = MEMORY):
        self.seconds, self.memory = seconds, memory

    def begin(self) -> None:
        limit_memory(self.memory)

    def check(self, message: Tokenize | Detokenize, size: int) -> None:
        if isinstance(message, Detokenize) and len(message.token_ids) > MAX_IDS:
            raise UserError(f"there are {len(message.token_ids)} tokens, and at most {MAX_IDS} are taken")
        if size > MAX_BYTES:
            raise UserError(f"the text has {size} bytes, and at most {MAX_BYTES} are taken; send less, or token ids")

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
