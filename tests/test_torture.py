"""The whole engine under random histories: everything is switched on, memory is tiny, and anything may happen at any time.

One state machine drives stage 8's engine on one rank (pages, chunks, radix tree, overlap, graphs by their stand-in,
retraction) and knows the text of every request: stage 1's where it is greedy, stage 2's elsewhere, up to the first
thing that ends it. Freed pages are poisoned. After every step memory is in order; a step with work gets on; no request
has a token after its end; a cancelled one has a part of its text; none found what only another tenant's had brought;
and in the end nothing is held. CI tries 100 histories, HYPOTHESIS_PROFILE=nightly 2,000.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from common.checkpoint import load
from common.config import UserError
from stage1_naive.generate import generate
from stage2_req.build import build_engine as build_stage2
from stage7_radix.params import RequestParams
from stage8_tp.build import build_engine
from tests.conftest import PROFILE, copy_with_eos
from tests.test_stage7 import poison_freed_pages

LONGEST = 16  # tokens asked for at the most
MAX_LEN = 56  # of the model, in tokens
EOS = [0, 24, 48, 72]
CROWD = 7  # requests at a time
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 11},
    "filtered": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 12, "logprobs": 2},
    "penalties": {"temperature": 0.8, "seed": 13, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "biased": {"logit_bias": {7: 4.0, 9: -4.0}, "logprobs": 0},
}


class Oracle:
    """The text after a prompt, as if no token could end it, and its log-probabilities where they are asked for."""

    def __init__(self, checkpoint, folder):
        self.checkpoint, self.naive = checkpoint, load(checkpoint.config())
        self.engine = build_stage2(checkpoint.config())
        self.eos_folder, self.answers = str(copy_with_eos(checkpoint, folder / "eos", EOS)), {}

    def answer(self, prompt: list[int], kind: str) -> tuple[list[int], list]:
        key = tuple(prompt), kind
        if key not in self.answers:
            if kind == "greedy":
                self.answers[key] = [*generate(self.naive.model, self.naive.kernels, prompt, LONGEST)], []
            else:
                (req,) = self.engine.generate([prompt], RequestParams(max_tokens=LONGEST, **KINDS[kind]))
                self.answers[key] = req.output_ids, req.logprobs
        return self.answers[key]


# What a caller asks for. The prompt is one of three families, cut where it may hurt, sometimes with a strange end: few
# enough to meet each other.
ASKED = st.fixed_dictionaries({
    "family": st.integers(0, 2),
    "cut": st.sampled_from([1, 4, 8, 15, 16, 17, 31, 40]),
    "tail": st.sampled_from([0, 0, 3, 9]),
    "kind": st.just("greedy") | st.sampled_from([*KINDS]),
    "max_tokens": st.sampled_from([LONGEST, LONGEST - 1, 1]) | st.integers(1, LONGEST),
    "stop_at": st.none() | st.integers(0, LONGEST - 1),
    "salt": st.sampled_from(["", "", "", "a"]),
    "ignore_eos": st.booleans(),
})  # fmt: skip


@dataclass
class Ask:
    """A request, and what must come of it."""

    prompt: list[int]
    kind: str
    params: RequestParams
    text: list[int]  # all that may come
    reason: str
    seen: list[int] = field(default_factory=list)  # so far
    ended: str | None = None

    @property
    def finishing(self) -> bool:
        """One token before its end, and under overlap that token is under way as a rule."""
        return len(self.seen) == len(self.text) - 1


class History(RuleBasedStateMachine):
    """One engine, and what is known of its requests by uid."""

    def __init__(self, oracle: Oracle, tally: Counter):
        super().__init__()
        self.oracle, self.tally, self.asks, self.idle = oracle, tally, {}, 0

    @property
    def live(self) -> list[int]:
        return [uid for uid, ask in self.asks.items() if not ask.ended]

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 16]),
        kv_tokens=st.integers(20, 60) | st.integers(20, 140),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        max_running=st.integers(1, 6),
        largest_graph=st.sampled_from([1, 3, 256]),
        largest_mixed=st.sampled_from([0, 8, 1024]),
        overlap=st.sampled_from([True, True, True, False]),
        graph=st.sampled_from([True, True, True, False]),
        order=st.sampled_from(["fcfs", "prefix"]),
    )
    def build(self, page_size, kv_tokens, budget, max_running, largest_graph, largest_mixed, overlap, graph, order):
        self.engine = build_engine(
            self.oracle.checkpoint.config(
                model=self.oracle.eos_folder,
                page_size=page_size,
                kv_tokens=max(page_size, kv_tokens),
                max_batch_tokens=budget,
                max_running=max_running,
                max_model_len=MAX_LEN,
                graph_max_batch=largest_graph,
                graph_max_tokens=largest_mixed,
                overlap=overlap,
                graph=graph,
                order=order,
            )
        )
        poison_freed_pages(self.engine)

    # --- what callers do ---

    def ask(self, family, cut, tail, kind, max_tokens, stop_at, salt, ignore_eos) -> Ask:
        checkpoint = self.oracle.checkpoint
        prompt = checkpoint.prompt(40, family)[:cut] + checkpoint.prompt(9, 3)[:tail]
        text, _ = self.oracle.answer(prompt, kind)
        stop_ids = frozenset() if stop_at is None else frozenset({text[stop_at]})
        room = self.engine.cache.max_len - len(prompt) + 1  # the last token needs no slot
        end, reason = (max_tokens, "max_tokens") if max_tokens <= room else (room, "length")
        for i, token in enumerate(text[: max(end, 0)]):
            if token in stop_ids or (token in EOS and not ignore_eos):
                end, reason = i + 1, "stop_token" if token in stop_ids else "eos"
                break
        params = RequestParams(
            max_tokens=max_tokens, stop_token_ids=stop_ids, cache_salt=salt, ignore_eos=ignore_eos, **KINDS[kind]
        )
        return Ask(prompt, kind, params, text[: max(end, 0)], reason)

    @precondition(lambda self: len(self.live) < CROWD)
    @rule(asked=ASKED, copies=st.sampled_from([1, 1, 1, 2, 3]))
    def add(self, asked, copies):
        for _ in range(copies):
            self.enqueue(self.ask(**asked))

    def enqueue(self, ask: Ask) -> None:
        before = self.engine.stats()
        if len(ask.prompt) > self.engine.cache.max_len:
            with pytest.raises(UserError, match="there is room for"):
                self.engine.add(ask.prompt, ask.params)
            assert self.engine.stats() == before
            self.tally["refused"] += 1
        else:
            self.asks[self.engine.add(ask.prompt, ask.params)] = ask

    @precondition(lambda self: self.live)
    @rule()
    def step(self):
        before = self.engine.stats().computed_tokens
        outputs = self.engine.step()
        self.book(outputs)
        self.idle = 0 if outputs or self.engine.stats().computed_tokens > before else self.idle + 1
        assert self.idle < 2, "a step neither computed nor brought a token, and it was not the first"

    @precondition(lambda self: self.live)
    @rule(times=st.integers(2, 12))
    def steps(self, times):
        for _ in range(times):
            if self.live:
                self.step()

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 30), count=st.sampled_from([1, 1, 1, 2, CROWD]))
    def abort(self, choice, count):
        """From one on, the next few."""
        live = self.live[choice % len(self.live) :]
        for uid in live[:count]:
            self.cancel(uid)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 30), again=st.booleans())
    def cancel_while_finishing(self, choice, again):
        """Its last token is under way, or is the next to come; maybe the same is asked for again at once."""
        while self.live and not (finishing := [uid for uid in self.live if self.asks[uid].finishing]):
            self.step()
        if self.live:
            self.cancel(uid := finishing[choice % len(finishing)])
            if again:
                ask = self.asks[uid]
                self.enqueue(Ask(ask.prompt, ask.kind, ask.params, ask.text, ask.reason))
            self.tally["finishing"] += 1

    @precondition(lambda self: self.asks)
    @rule(choice=st.integers(0, 30))
    def abort_what_is_not_here(self, choice):
        ended = [uid for uid, ask in self.asks.items() if ask.ended]
        strangers = [*ended, max(self.asks) + 1]
        assert not self.engine.abort(strangers[choice % len(strangers)])
        self.check()

    def cancel(self, uid: int) -> None:
        assert self.engine.abort(uid)
        assert not self.engine.abort(uid)
        self.asks[uid].ended = "abort"
        self.tally["abort"] += 1
        self.check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def retract(self):
        """As if memory had run out just now."""
        self.engine.scheduler.retract()
        self.check()

    @precondition(lambda self: not self.live)
    @rule(several=st.lists(ASKED, max_size=3))
    def generate_all(self, several):
        self.drain()
        asks = [ask for ask in (self.ask(**asked) for asked in several) if len(ask.prompt) <= self.engine.cache.max_len]
        reqs = self.engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks])
        for req, ask in zip(reqs, asks, strict=True):
            assert (req.output_ids, req.finish_reason) == (ask.text, ask.reason)
            ask.seen, ask.ended = req.output_ids, req.finish_reason
            self.asks[req.uid] = ask
            self.compare_logprobs(ask, 0, req.logprobs)
            self.check_tenant(req)
        self.check()
        self.tally["generated"] += len(reqs)

    # --- what must hold ---

    def book(self, outputs):
        assert len({output.uid for output in outputs}) == len(outputs)
        for output in outputs:
            ask = self.asks[output.uid]
            assert not ask.ended, "a token after the end"
            ask.seen.append(output.token_id)
            assert ask.seen == ask.text[: len(ask.seen)]
            if ask.params.logprobs is not None:
                self.compare_logprobs(ask, len(ask.seen) - 1, [output.logprobs])
            if output.finish_reason is not None:
                ask.ended = output.finish_reason
                self.tally[ask.ended] += 1
                self.check_tenant(output.req)
            assert (len(ask.seen) == len(ask.text)) == (ask.ended == ask.reason)
        self.check()

    def compare_logprobs(self, ask: Ask, start: int, entries: list) -> None:
        expected = self.oracle.answer(ask.prompt, ask.kind)[1][start:]
        for entry, want in zip(entries, expected, strict=False):
            assert entry.chosen == pytest.approx(want.chosen, abs=1e-3)
            assert [token for token, _ in entry.top] == [token for token, _ in want.top]

    def check_tenant(self, req) -> None:
        """What it found was at most what another request of the same salt had begun with, or answered."""
        ask, known = self.asks[req.uid], 0
        for uid, other in self.asks.items():
            if uid != req.uid and other.params.cache_salt == ask.params.cache_salt:
                theirs = other.prompt + other.text
                same = [mine == their for mine, their in zip(ask.prompt, theirs, strict=False)]
                known = max(known, (*same, False).index(False))
        assert req.cached_tokens <= min(known, len(ask.prompt) - 1)

    def check(self):
        self.engine.cache.check_integrity()
        stats = self.engine.stats()
        assert stats.running + stats.waiting == len(self.live)
        assert self.engine.has_work() or not self.live
        assert 0 <= stats.usage <= 1

    def drain(self):
        """No request is left; at most one step is under way, and what it computes belongs to none."""
        if self.engine.has_work():
            assert self.engine.step() == []
        assert not self.engine.has_work()
        assert self.engine.step() == []

    def teardown(self):
        """To the end: the oldest computes in every step but one, so this bounds the number of steps."""
        if not hasattr(self, "engine"):
            return
        limit = (MAX_LEN + LONGEST) * (len(self.live) + 1)
        while self.live and limit:
            self.step()
            limit -= 1
        assert not self.live
        self.drain()
        cache, stats = self.engine.cache, self.engine.stats()
        cache.check_integrity()
        assert (stats.running, stats.waiting, stats.usage) == (0, 0, 0)
        assert cache.tree.num_locked == 0
        assert cache.allocator.num_free + cache.tree.num_pages == cache.allocator.num_pages
        cache.allocator.free(cache.tree.evict(cache.allocator.num_pages))
        assert cache.allocator.num_free == cache.allocator.num_pages
        self.tally.update(
            histories=1,
            steps=stats.steps,
            hits=stats.hit_tokens,
            retracted=stats.retracted,
            replays=getattr(self.engine.runner, "num_replays", 0),
        )


def test_torture(tiny_checkpoint, tmp_path):
    oracle, tally = Oracle(tiny_checkpoint("llama"), tmp_path), Counter()

    def history() -> History:
        return History(oracle, tally)

    if PROFILE.derandomize:
        seed(8)(history)
    run_state_machine_as_test(history, settings=PROFILE)
    seen = ("eos", "stop_token", "max_tokens", "length", "abort", "finishing", "refused", "generated")
    assert all(tally[what] for what in (*seen, "hits", "retracted", "replays")), tally
