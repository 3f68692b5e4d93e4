"""Reads a trace, and rebuilds the engine's state after every line. page.html does the same in JavaScript."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.config import UserError
from stage9_server.inspector.trace import SCHEMA, VERSION


@dataclass
class State:
    """After one line. Lists of uids and pages are plain ints again, not runs."""

    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    lengths: dict[int, list] = field(default_factory=dict)  # uid -> [state, cached_len, device_len, tokens on the host]
    rows: dict[int, list[int]] = field(default_factory=dict)  # uid -> its pages, in the order of positions
    nodes: dict[int, list] = field(default_factory=dict)  # id -> [parent, locks, used, pages]

    def apply(self, line: dict) -> None:
        if line.get("key"):
            self.lengths, self.rows, self.nodes = {}, {}, {}
        for name in ("waiting", "running"):
            if name in line:
                setattr(self, name, unrun(line[name]))
        for uid, *_ in line.get("ends", ()):
            self.lengths.pop(uid, None)
        for uid, *lengths in line.get("lengths", ()):
            self.lengths[uid] = lengths
        for uid in unrun(line.get("grown", ())):
            state, *numbers = self.lengths[uid]
            self.lengths[uid] = [state, *(number + 1 for number in numbers)]
        for uid in line.get("dropped", ()):
            self.rows.pop(uid, None)
        for uid, first, *pages in line.get("rows", ()):
            self.rows[uid] = self.rows.get(uid, [])[:first] + unrun(pages)
        for number in line.get("evicted", ()):
            self.nodes.pop(number, None)
        for number, parent, locks, used, *rest in line.get("nodes", ()):
            self.nodes[number] = [parent, locks, used, unrun(rest[0]) if rest else self.nodes[number][3]]

    def page_map(self, num_pages: int) -> list[tuple[str, int]]:
        """For every page: ("free", 0), ("request", uid) or ("tree", id of the node)."""
        owners = [("free", 0)] * num_pages
        for uid, pages in self.rows.items():
            for page in pages:
                owners[page] = "request", uid
        for number, (*_, pages) in self.nodes.items():
            for page in pages:
                owners[page] = "tree", number
        return owners


def unrun(flat: Sequence[int]) -> list[int]:
    """What `runs` took apart."""
    return [
        number for first, count in zip(flat[::2], flat[1::2], strict=True) for number in range(first, first + count)
    ]


def parse(data: bytes) -> tuple[dict, list[dict]]:
    """The header, and the lines. Raises UserError if this is no trace, or one of a newer schema."""
    try:
        header, *lines = [msgspec.json.decode(line) for line in data.splitlines() if line]
        known = header["schema"] == SCHEMA, header["version"]
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"this is no trace of an engine, or a damaged one ({error}); record it again") from error
    if not known[0]:
        raise UserError(f"this is no trace of an engine; its first line must say {SCHEMA}")
    if known[1] > VERSION:
        raise UserError(f"the trace has version {known[1]} and this reader knows {VERSION}; update the repository")
    return header, lines


def read(path: str | Path) -> tuple[dict, list[dict]]:
    return parse(Path(path).read_bytes())


def replay(lines: Iterable[dict]) -> Iterator[State]:
    """The state after every line: one object, which changes."""
    state = State()
    for line in lines:
        state.apply(line)
        yield state
