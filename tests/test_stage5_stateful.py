"""Stages 4 and 5 under random histories of add, abort and step, against Hugging Face's and stage 2's texts.

After every step memory is in order; a step with work computes something; no request has a token after its end; and in
the end every request has exactly its text and its reason, and no page or region is held. The pools are so small that requests are
retracted all the time. HYPOTHESIS_PROFILE=nightly tries many more histories.
"""

from collections import Counter

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage4_batch.build import build_engine as build_stage4
from stage5_paged.build import build_engine as build_stage5
from tests.conftest import PROFILE, reference

# (stage, page size, tokens in the pool, budget, requests at a time)
ENGINES = [
    (4, 1, 40, 1, 6), (4, 1, 40, 5, 3), (4, 1, 40, 64, 2),
    (5, 1, 40, 64, 6), (5, 1, 57, 5, 3), (5, 3, 48, 16, 6), (5, 3, 40, 1, 2), (5, 4, 64, 64, 6),
    (5, 4, 48, 5, 6), (5, 4, 40, 64, 1), (5, 16, 57, 64, 2), (5, 16, 120, 16, 6),
]  # fmt: skip

SETTINGS = settings(PROFILE, max_examples=5 if PROFILE.derandomize else PROFILE.max_examples // len(ENGINES))

PROMPT_LENGTHS = (1, 3, 4, 8, 16, 17, 30)
LONGEST = 32  # tokens asked for at the most
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 11},
    "filtered": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 12},
    "penalties": {"temperature": 0.8, "seed": 13, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
}


class Oracle:
    """The text after a prompt: Hugging Face's where it is greedy, else stage 2's for the prompt alone."""

    def __init__(self, checkpoint):
        self.checkpoint, self.engine, self.texts = checkpoint, build_stage2(checkpoint.config()), {}

    def text(self, length: int, kind: str) -> list[int]:
        if (length, kind) not in self.texts:
            prompt, params = self.checkpoint.prompt(length), SamplingParams(max_tokens=LONGEST, **KINDS[kind])
            self.texts[length, kind] = self.engine.generate([prompt], params)[0].output_ids
            if kind == "greedy":
                assert self.texts[length, kind] == reference(self.checkpoint, prompt, LONGEST)
        return self.texts[length, kind]


class History(RuleBasedStateMachine):
    """One engine, and what is known of its requests by uid."""

    def __init__(self, engine, oracle: Oracle, tally: Counter):
        super().__init__()
        self.engine, self.oracle, self.tally = engine, oracle, tally
        self.expected, self.texts, self.reasons = {}, {}, {}

    @property
    def live(self) -> list[int]:
        return [uid for uid in self.texts if uid not in self.reasons]

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        length=st.sampled_from(PROMPT_LENGTHS),
        kind=st.just("greedy") | st.sampled_from([*KINDS]),
        max_tokens=st.sampled_from([LONGEST, 20]) | st.integers(1, LONGEST),
        stop_at=st.none() | st.integers(0, LONGEST - 1),
        copies=st.integers(1, 4),
    )
    def add(self, length, kind, max_tokens, stop_at, copies):
        text = self.oracle.text(length, kind)
        stop_ids = set() if stop_at is None else {text[stop_at]}
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids, **KINDS[kind])
        room = self.engine.cache.max_len - length + 1  # the last token needs no slot
        end, reason = (max_tokens, "max_tokens") if max_tokens <= room else (room, "length")
        if stop_ids & set(text[:end]):
            end, reason = text.index(text[stop_at]) + 1, "stop_token"
        for _ in range(copies):
            uid = self.engine.add(self.oracle.checkpoint.prompt(length), params)
            self.expected[uid], self.texts[uid] = (text[:end], reason), []

    @precondition(lambda self: self.live)
    @rule()
    def step(self):
        before = self.engine.stats().computed_tokens
        self.book(self.engine.step())
        assert self.engine.stats().computed_tokens > before

    @precondition(lambda self: self.live)
    @rule(times=st.integers(2, 16))
    def steps(self, times):
        for _ in range(times):
            if self.live:
                self.step()

    @precondition(lambda self: self.live and 4 * [*self.reasons.values()].count("abort") < len(self.texts))
    @rule(choice=st.integers(0, 30), under_way=st.booleans())
    def abort(self, choice, under_way):
        """Between two steps, or during one: it may be the very step in which the request would have ended."""
        outputs, uid = [], self.live[choice % len(self.live)]
        self.reasons[uid] = "abort"
        if under_way:
            batch = self.engine.scheduler.schedule()
            samples = self.engine.launch(batch)
        assert self.engine.abort(uid)
        assert not self.engine.abort(uid)
        if under_way:
            outputs = self.engine.collect(batch, samples)
        self.book(outputs)
        self.tally["aborted"] += 1

    def book(self, outputs):
        assert len({output.uid for output in outputs}) == len(outputs)
        for output in outputs:
            assert output.uid in self.live
            self.texts[output.uid].append(output.token_id)
            text, reason = self.expected[output.uid]
            assert self.texts[output.uid] == text[: len(self.texts[output.uid])]
            if output.finish_reason is not None:
                self.reasons[output.uid] = output.finish_reason
                assert (self.texts[output.uid], output.finish_reason) == (text, reason)
                self.tally[reason] += 1
        self.check()

    def check(self):
        self.engine.cache.check_integrity()
        stats = self.engine.stats()
        assert stats.running + stats.waiting == len(self.live)
        assert self.engine.has_work() == bool(self.live)
        assert 0 <= stats.usage <= 1

    def teardown(self):
        """To the end: the oldest computes in every step, so this bounds the number of steps."""
        limit = (max(PROMPT_LENGTHS) + LONGEST) * len(self.live)
        while self.live and limit:
            self.step()
            limit -= 1
        assert not self.live
        assert self.engine.step() == []
        assert self.engine.stats().usage == 0
        self.tally["steps"] += self.engine.stats().steps
        self.tally["retracted"] += self.engine.stats().retracted


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint):
    return Oracle(tiny_checkpoint("llama"))


@pytest.mark.parametrize("stage,page_size,kv_tokens,budget,max_running", ENGINES)
def test_random_histories(oracle, stage, page_size, kv_tokens, budget, max_running):
    build, tally = {4: build_stage4, 5: build_stage5}[stage], Counter()
    config = oracle.checkpoint.config(
        page_size=page_size, kv_tokens=kv_tokens, max_batch_tokens=budget, max_running=max_running, max_model_len=50
    )

    def history() -> History:
        return History(build(config), oracle, tally)

    if PROFILE.derandomize:
        seed(page_size * kv_tokens * budget * max_running)(history)
    run_state_machine_as_test(history, settings=SETTINGS)
    if stage == 5 and budget > 1 < max_running:
        assert tally["retracted"] > 0
