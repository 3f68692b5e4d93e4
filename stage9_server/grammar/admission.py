"""Where calls wait for their grammar, outside the engine, so that no other request waits with them."""

from concurrent.futures import Future

from common.config import UserError
from stage9_server.grammar.compiler import Compiler
from stage9_server.messages import Generate

MAX_HELD = 1024  # calls


class Admission:
    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self.held: list[tuple[Generate, Future[None]]] = []

    def hold(self, call: Generate) -> bool:
        """Has the call to wait? Raises UserError if too many do."""
        if not call.params.grammar or (done := self.compiler.prepare(call.params.grammar)).done():
            return False
        if len(self.held) >= MAX_HELD:
            raise UserError(f"{MAX_HELD} requests wait for their grammar already; try again later")
        self.held.append((call, done))
        return True

    def take(self) -> list[tuple[Generate, str]]:
        """Calls whose wait is over; with why the grammar can't be used, or an empty text."""
        over = [(call, done) for call, done in self.held if done.done()]
        self.held = [(call, done) for call, done in self.held if not done.done()]
        return [(call, str(done.exception() or "")) for call, done in over]
