"""The engine's side of a live trace: starts it when somebody begins to look, and ends it with the last who does."""

from functools import partial

from common.tokenizer import load_tokenizer
from stage2_req.engine import Engine
from stage8_tp.engine import TPEngine
from stage9_server.inspector.messages import Inspect, Inspected
from stage9_server.inspector.trace import KEY_EVERY, Trace, encode

EVERY, SHARE = 0.1, 0.01  # seconds between two lines at the least, and the most of the time that they may take


class Watching:
    """In the scheduler's process. Without onlookers there is no trace, and the engine runs as if this did not exist."""

    def __init__(self, engine: Engine | TPEngine, model: str):
        self.engine, self.model = engine, model
        self.trace: Trace | None = None
        self.sent = 0  # lines

    def handle(self, message: Inspect) -> list:
        if not message.on:
            self.close()
        elif not self.trace or message.anew:
            self.trace = self.trace or self.open(message.text)
            self.trace.record(is_key=True)
        return []

    def open(self, text: bool) -> Trace:
        self.sent, decode = 0, None
        if text:
            tokenizer = load_tokenizer(self.model)
            decode = partial(tokenizer.decode, skip_special=False) if tokenizer else str
        return Trace(self.engine, decode, EVERY, SHARE, max_lines=2 * KEY_EVERY)

    def close(self) -> None:
        if self.trace:
            self.trace.close()
            self.trace = None

    def news(self) -> Inspected | None:
        """The lines since the last time."""
        trace = self.trace
        if trace and not self.engine.has_work():
            trace.record()  # how it ended, however soon after the last line
        if trace is None or trace.total == self.sent:
            return None
        lines, self.sent = trace.lines(after=self.sent), trace.total
        return Inspected(encode(trace.header()), lines)
