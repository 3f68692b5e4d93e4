"""A trace of a running engine: one line of JSON per step, from which every queue, length, page and tree node can be rebuilt.

`Trace(engine)` puts itself in front of a few methods of the engine and of its parts, and `close` takes itself away
again: an engine that is not watched runs the same instructions as ever. It owns the lines, and what was last written of
each request, page and node; all the rest it only looks at. README.md describes the lines, reader.py reads them.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch

from common.config import UserError
from stage2_req.engine import Engine
from stage2_req.parts import CacheManager, Runner
from stage2_req.req import Batch, Output, Req, Samples
from stage3_kvcache.cache import SingleCacheManager
from stage4_batch.cache import FixedCacheManager
from stage5_paged.cache import PagedCacheManager
from stage6_cudagraph.graph_runner import GraphRunner
from stage7_radix.cache import RadixCacheManager
from stage7_radix.radix_tree import Node
from stage8_tp.engine import TPEngine

SCHEMA, VERSION = "sglang-from-zero/trace", 1
KEY_EVERY = 64  # lines from one key frame to the next at the least; the ring forgets such stretches as a whole
MAX_LINES, MAX_BYTES = 10_000, 64 << 20

Span = tuple[float, float]  # begin and end, in seconds of time.perf_counter
encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Launched:
    """A step on the device."""

    batch: Batch
    number: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # before and after it, on a GPU
    span: Span  # of the call, which on a CPU is the work itself


@dataclass
class Seen:
    """What the lines so far say."""

    reqs: dict[int, Req] = field(default_factory=dict)  # by uid, until they end
    lengths: dict[int, tuple[str, int, int, int]] = field(default_factory=dict)  # state, cached, device, tokens
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # pages of each row of the page table
    nodes: dict[Node, tuple[int, int, int, int]] = field(default_factory=dict)  # id, parent, locks, used
    pages: dict[Node, np.ndarray] = field(default_factory=dict)  # of each node


class Trace:
    """The last steps of an engine, at most `max_lines` and `max_bytes` of them.

    text: turns token ids into text, which is part of the lines then; without it no line has any.
    every: seconds between two lines at the least; steps in between are counted and left out.
    share: of the time that may go into lines, at the most; where a line takes long, there are fewer.
    """

    def __init__(
        self,
        engine: Engine | TPEngine,
        text: Callable[[list[int]], str] | None = None,
        every: float = 0.0,
        share: float = 1.0,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
    ):
        self.engine = engine.engine if isinstance(engine, TPEngine) else engine
        self.text, self.every, self.share = text, every, share
        self.max_lines, self.max_bytes = max_lines, max_bytes
        self.ring: deque[bytes] = deque()
        self.keys: deque[int] = deque()  # numbers of those lines of the ring that are key frames
        self.first = self.num_bytes = 0  # number of the ring's first line; size of all
        self.key_size = self.since_key = 0  # bytes of the last key frame, and of what came after it
        self.seen, self.late, self.found = Seen(), set(), {}
        self.steps = self.launches = self.num_nodes = 0
        self.spans: dict[str, Span] = {}  # of the step under way
        self.batch: Launched | None = None  # launched in the step under way
        self.collected: Launched | None = None
        self.in_flight: list[Launched] = []
        self.graph = 0
        self.watched: list[tuple[object, str]] = []
        self.due = 0.0  # when the next line may be written
        if (device := self.engine.device).type == "cuda":  # one moment on both clocks
            torch.cuda.synchronize(device)
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
            torch.cuda.synchronize(device)
        self.began = time.perf_counter()
        self.watch()

    # --- in front of the engine's methods ---------------------------------------------------------------------------

    def watch(self) -> None:
        engine = self.engine
        self.replace(engine, "step", self.step)
        self.replace(engine, "launch", self.launch)
        self.replace(engine, "collect", self.collect)
        self.replace(engine.scheduler, "schedule", partial(self.timed, "schedule"))
        self.replace(engine.scheduler, "update", partial(self.timed, "update"))
        self.replace(engine.runner, "forward", self.forward)

    def replace(self, owner: object, name: str, function: Callable) -> None:
        if name in vars(owner):
            self.close()
            raise UserError(f"{type(owner).__name__}.{name} is watched already; close the other trace first")
        setattr(owner, name, partial(function, getattr(owner, name)))
        self.watched.append((owner, name))

    def close(self) -> None:
        """The engine runs unwatched again; the lines stay."""
        for owner, name in self.watched:
            delattr(owner, name)
        self.watched.clear()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_) -> None:
        self.record()
        self.close()

    def timed(self, name: str, inner: Callable, *args):
        start = time.perf_counter()
        result = inner(*args)
        self.spans[name] = start, time.perf_counter()
        return result

    def step(self, inner: Callable) -> list[Output]:
        outputs = inner()
        self.steps += 1
        if time.perf_counter() >= self.due:
            self.record()
        else:
            self.forget_step()
        return outputs

    def launch(self, inner: Callable, batch: Batch) -> Samples:
        return self.timed("launch", inner, batch)

    def forward(self, inner: Callable, batch: Batch) -> Samples:
        events, cuda = None, self.engine.device.type == "cuda"
        self.graph = graph_size(self.engine.runner, batch)
        start = time.perf_counter()
        if cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        samples = inner(batch)
        if cuda:
            events[1].record()
        self.batch = Launched(batch, self.launches, events, (start, time.perf_counter()))
        self.in_flight.append(self.batch)
        self.launches += 1
        return samples

    def collect(self, inner: Callable, batch: Batch, samples: Samples) -> list[Output]:
        start = time.perf_counter()
        live = [req for req in batch.sampled if not req.finish_reason]
        outputs = inner(batch, samples)
        self.spans["wait"] = start, self.spans["update"][0]
        self.collected = next((launched for launched in self.in_flight if launched.batch is batch), None)
        self.in_flight = [launched for launched in self.in_flight if launched.batch is not batch]
        # an end that could not be foreseen: the step behind this one computes the request once more, for nothing
        ahead = [req for launched in self.in_flight for req in launched.batch.reqs]
        self.late |= {req.uid for req in live if req.finish_reason and req in ahead}
        return outputs

    # --- a line -----------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Lines so far, those that were forgotten included."""
        return self.first + len(self.ring)

    def record(self, is_key: bool = False) -> None:
        """Write down what has changed since the last line; nothing if nothing has. A key frame says all."""
        start = time.perf_counter()
        is_key = is_key or not self.keys or self.key_is_due()
        line = self.requests(is_key) | self.memory(is_key) | self.tree(is_key)
        if not (line or self.spans):
            return
        line = {"n": self.steps} | ({"key": True} if is_key else {}) | self.times() | self.decided(is_key) | line
        self.forget_step()
        self.ring.append(encode(line))
        size = len(self.ring[-1])
        self.since_key += size
        if is_key:
            self.keys.append(self.total - 1)
            self.key_size, self.since_key = size, 0
        self.num_bytes += size + 1
        while len(self.keys) > 1 and (len(self.ring) > self.max_lines or self.num_bytes > self.max_bytes):
            self.keys.popleft()
            for _ in range(self.keys[0] - self.first):
                self.num_bytes -= len(self.ring.popleft()) + 1
            self.first = self.keys[0]
        took = (end := time.perf_counter()) - start
        self.due = end + max(self.every, took / self.share - took)

    def key_is_due(self) -> bool:
        """Key frames are not much more than half of all bytes, however much there is to say."""
        return self.total >= self.keys[-1] + KEY_EVERY and self.since_key >= self.key_size

    def forget_step(self) -> None:
        self.spans, self.batch, self.collected, self.graph = {}, None, None, 0

    def micro(self, seconds: float) -> int:
        """Microseconds since the trace began."""
        return round((seconds - self.began) * 1e6)

    def times(self) -> dict:
        line = {"t": {name: [self.micro(a), self.micro(b)] for name, (a, b) in self.spans.items()}}
        if done := self.collected:
            if done.events:
                done.events[1].synchronize()
                span = [round(self.origin.elapsed_time(event) * 1e3) for event in done.events]
            else:
                span = [self.micro(moment) for moment in done.span]
            line["device"] = [done.number, *span]
        return line

    def decided(self, is_key: bool) -> dict:
        """The batch, as it was scheduled."""
        if not self.batch:
            return {}
        batch, d = self.batch.batch, self.batch.batch.num_decodes
        result: dict = {"id": self.batch.number}
        decodes = [req.uid for req in batch.reqs[:d]]
        if is_key or decodes != self.seen.decodes:
            result["decodes"] = runs(decodes)
            self.seen.decodes = decodes
        columns = batch.reqs[d:], batch.prefix_lens[d:].tolist(), batch.extend_lens[d:].tolist()
        chunks = [[req.uid, start, length] for req, start, length in zip(*columns, strict=True)]
        result |= ({"chunks": chunks} if chunks else {}) | ({"graph": self.graph} if self.graph else {})
        return {"batch": result}

    def requests(self, is_key: bool) -> dict:
        """Queues, lengths, who is new, and who is done."""
        scheduler, seen = self.engine.scheduler, self.seen
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        now = {req.uid: req for req in chain(waiting, running)}
        passed = {req.uid: req for req in self.batch.batch.reqs if req.uid not in seen.reqs} if self.batch else {}
        came = {uid: req for uid, req in (passed | now).items() if seen.reqs.get(uid) is not req}
        left = {uid: req for uid, req in (passed | seen.reqs).items() if now.get(uid) is not req}
        line: dict = {"ends": [[uid, req.finish_reason, int(uid in self.late)] for uid, req in left.items()]}
        line["retracted"] = [req.uid for req in waiting if seen.lengths.get(req.uid, ("",))[0] == "running"]
        line["text"] = self.new_text(came, left, now) if self.text else []
        line["new"] = [self.describe(req) for req in (now | came if is_key else came).values()]
        for uid in left:
            seen.lengths.pop(uid, None)
            self.late.discard(uid)
        seen.reqs = now

        line["hits"] = [
            [uid, req.cached_tokens] for uid, req in {**came, **now, **left}.items() if self.is_hit(uid, req)
        ]
        self.found = {uid: found for uid, found in self.found.items() if uid in now}

        lengths = {req.uid: (self.waits_as(req.uid), *lengths_of(req)) for req in waiting}
        lengths |= {req.uid: ("running", *lengths_of(req)) for req in running}
        line["lengths"], grown = [], []
        for uid, new in lengths.items():
            old = seen.lengths.get(uid)
            if old == new and not is_key:
                continue
            if not is_key and old and new == (old[0], old[1] + 1, old[2] + 1, old[3] + 1):
                grown.append(uid)
            else:
                line["lengths"].append([uid, *new])
        line["grown"] = runs(sorted(grown))
        seen.lengths = lengths
        for name, queue in (("waiting", waiting), ("running", running)):
            uids = [req.uid for req in queue]
            if is_key or uids != getattr(seen, name):
                line[name] = runs(uids)
                setattr(seen, name, uids)
        kept = {"waiting", "running"}  # where an empty list says something
        return {name: value for name, value in line.items() if value or name in kept}

    def waits_as(self, uid: int) -> str:
        return "retracted" if self.seen.lengths.get(uid, ("",))[0] in ("running", "retracted") else "waiting"

    def is_hit(self, uid: int, req: Req) -> bool:
        """Was part of its prompt found in the cache, and not told yet?"""
        if self.found.get(uid) is req or not req.cached_tokens:
            return False
        self.found[uid] = req
        return True

    def describe(self, req: Req) -> list:
        entry = [req.uid, req.prompt_len, req.max_device_len, self.micro(req.arrived_at)]
        return [*entry, self.text(req.token_ids[: req.prompt_len])] if self.text else entry

    def new_text(self, came: dict[int, Req], left: dict[int, Req], now: dict[int, Req]) -> list:
        """What each request's newest tokens say."""
        pieces = []
        for uid, req in {**came, **left, **now}.items():
            start = req.prompt_len if uid in came else self.seen.lengths.get(uid, ("", 0, 0, req.prompt_len))[3]
            if fresh := req.token_ids[start:]:
                pieces.append([uid, self.text(fresh)])
        return pieces

    def memory(self, is_key: bool) -> dict:
        """Rows of the page table, from the first entry on that is another than before."""
        rows, old, changes = rows_of(self.engine.cache), {} if is_key else self.seen.rows, []
        kept = {}
        for uid, row in rows.items():
            before = old.get(uid)
            if before is None:
                changes.append([uid, 0, *runs(row)])
                kept[uid] = row.copy()
                continue
            same = min(len(before), len(row))
            differs = (before[:same] != row[:same]).nonzero()[0]
            first = int(differs[0]) if len(differs) else same
            if first == len(before) == len(row):
                kept[uid] = before
            else:
                changes.append([uid, first, *runs(row[first:])])
                kept[uid] = row.copy()
        gone = [uid for uid in self.seen.rows if uid not in rows]
        self.seen.rows = kept
        return {name: value for name, value in (("rows", changes), ("dropped", gone)) if value}

    def tree(self, is_key: bool) -> dict:
        """Nodes of the radix tree that are new, or have other pages, locks or uses than before."""
        cache = self.engine.cache
        if not isinstance(cache, RadixCacheManager):
            return {}
        tree, old, changes = cache.tree, self.seen.nodes, []
        stack, new, pages = [(child, 0) for child in tree.root.children.values()], {}, {}
        while stack:
            node, parent = stack.pop()
            before = old.get(node)
            if before is None:
                self.num_nodes += 1
            number = before[0] if before else self.num_nodes
            stack += [(child, number) for child in node.children.values()]
            new[node] = entry = (number, parent, node.locks, node.used)
            pages[node] = node.pages  # the tree changes no array of pages, it takes another one
            if is_key or self.seen.pages.get(node) is not node.pages:
                text = [self.text(node.key.tolist())] if self.text else []
                changes.append([*entry, runs(node.pages), *text])
            elif before != entry:
                changes.append(list(entry))
        gone = [entry[0] for node, entry in old.items() if node not in new]
        self.seen.nodes, self.seen.pages = new, pages
        return {name: value for name, value in (("nodes", changes), ("evicted", gone)) if value}

    # --- out ----------------------------------------------------------------------------------------------------------

    def header(self) -> dict:
        """What does not change: the first line of a file."""
        engine, (page_size, num_pages) = self.engine, geometry(self.engine.cache)
        parts = {"engine": engine, "scheduler": engine.scheduler, "cache": engine.cache, "runner": engine.runner}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "page_size": page_size,
            "num_pages": num_pages,
            "budget": getattr(engine.scheduler, "budget", None),
            "device": engine.device.type,
            "device_name": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU",
            "parts": {name: type(part).__name__ for name, part in parts.items()},
            "text": self.text is not None,
        }

    def lines(self, after: int = 0) -> list[bytes]:
        """Encoded, without the header; from the line with this number on (`first` is the oldest)."""
        skip = max(0, after - self.first)
        return [line for number, line in enumerate(self.ring) if number >= skip]

    def dump(self) -> bytes:
        """The whole file: JSON lines."""
        return b"\n".join([encode(self.header()), *self.ring, b""])

    def save(self, path: str | Path) -> None:
        self.record()
        Path(path).write_bytes(self.dump())


def runs(numbers: Sequence[int] | np.ndarray) -> list[int]:
    """Numbers in their order, as first and count of every ascending run: 4, 5, 6, 2 -> [4, 3, 2, 1]."""
    if len(numbers) < 2:
        return [int(numbers[0]), 1] if len(numbers) else []
    array = np.asarray(numbers, np.int64)
    starts = np.concatenate(([0], (np.diff(array) != 1).nonzero()[0] + 1))
    counts = np.diff(np.append(starts, len(array)))
    return np.stack((array[starts], counts), axis=1).ravel().tolist()


def lengths_of(req: Req) -> Iterable[int]:
    return req.cached_len, req.device_len, len(req.token_ids)


def rows_of(cache: CacheManager) -> dict[int, np.ndarray]:
    """The pages of every request that has any, by uid, in the order of its positions."""
    match cache:
        case PagedCacheManager():
            return {uid: cache.page_table.host[row, : cache.held[row]] for uid, row in cache.table_idx.items()}
        case FixedCacheManager():
            return {uid: np.array([row]) for uid, row in cache.table_idx.items()}
        case SingleCacheManager():
            return {cache.owner.uid: np.array([0])} if cache.owner else {}
        case _:
            return {}


def geometry(cache: CacheManager) -> tuple[int, int]:
    """Tokens in a page, and how many pages there are; a fixed region is a page."""
    match cache:
        case PagedCacheManager():
            return cache.page_size, cache.allocator.num_pages
        case FixedCacheManager():
            return cache.max_len, cache.max_running
        case SingleCacheManager():
            return cache.max_len, 1
        case _:
            return 0, 0


def graph_size(runner: Runner, batch: Batch) -> int:
    """Tokens of the captured step that will compute the batch, padding included; 0 if none does."""
    graphs = next((g for g in runner.graphs if g.fit(batch)), None) if isinstance(runner, GraphRunner) else None
    return graphs.sizes[bisect_left(graphs.sizes, batch.num_tokens)] if graphs else 0
