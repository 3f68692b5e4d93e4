"""Stage 5: no page is handed out twice, a request holds what it needs and no more, the text does not depend on the page
size, and a retracted request goes on to exactly the same text; what can't be served is refused in words.
"""

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint import load
from common.config import EngineConfig, UserError
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage2_req.trace import TracedRunner
from stage5_paged.build import build_engine
from stage5_paged.cache import RESERVE, PagedCacheManager
from stage5_paged.page_allocator import OutOfPages, PageAllocator
from stage5_paged.sizing import measure_room
from tests.conftest import reference
from tests.test_conformance import reasons, run, step, tokens

CPU = torch.device("cpu")
PAGE_SIZES = (1, 3, 16, 64, 256)
JOBS = {70: 5, 1: 14, 33: 1, 8: 12, 16: 20, 2: 16, 15: 9, 64: 2}  # prompt length -> tokens asked for


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture
def build(llama):
    """build(page_size, kv_tokens) -> Engine, whose runner keeps a record of its steps."""

    def build(page_size: int = 4, kv_tokens: int = 1024, max_running: int = 8, max_model_len: int = 128, **changes):
        changes |= {"max_running": max_running, "max_model_len": max_model_len}
        engine = build_engine(llama.config(page_size=page_size, kv_tokens=kv_tokens, **changes))
        engine.runner = TracedRunner(engine.runner)
        return engine

    return build


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def poison_freed_pages(engine) -> None:
    """Fill every page with large values now, and again whenever it is freed."""
    cache, pool = engine.cache, engine.runner.runner.attention.pool
    free = cache.allocator.free

    def poison(pages) -> None:
        for layer in (*pool.k, *pool.v):
            layer.unflatten(0, (-1, cache.page_size))[torch.as_tensor(pages).long()] = 1e3

    def poison_and_free(pages) -> None:
        poison(pages)
        free(pages)

    poison(cache.allocator.free_pages().copy())
    cache.allocator.free = poison_and_free


# --- the allocator ----------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from(["alloc", "free"]), st.integers(0, 13)), max_size=40))
def test_a_page_has_one_owner_at_any_time(num_pages, actions):
    allocator, held = PageAllocator(num_pages), []
    for action, n in actions:
        if action == "free" and held:
            allocator.free(held.pop(n % len(held)))
        elif action == "alloc" and n <= allocator.num_free:
            held.append(allocator.alloc(n))
            assert len(held[-1]) == n
        elif action == "alloc":
            with pytest.raises(OutOfPages, match=f"{n} pages wanted, {allocator.num_free} free"):
                allocator.alloc(n)
        pages = np.concatenate([allocator.free_pages(), *held])
        assert sorted(pages.tolist()) == list(range(num_pages))
        assert len(allocator.free_pages()) == allocator.num_free


def test_what_the_allocator_hands_out_is_the_callers_own():
    allocator = PageAllocator(6)
    first = allocator.alloc(2)
    mine = first.copy()
    first[:] = -1
    second = allocator.alloc(2)
    allocator.free(mine)
    kept = second.copy()
    assert sorted([*allocator.alloc(4).tolist(), *kept.tolist()]) == list(range(6))
    assert second.tolist() == kept.tolist()


# --- the cache manager ------------------------------------------------------------------------------------------


def make_cache(num_pages: int, page_size: int, max_running: int = 4, max_len: int = 1000) -> PagedCacheManager:
    return PagedCacheManager(num_pages, page_size, max_running, max_len, CPU)


def make_req(uid: int, length: int) -> Req:
    return Req(uid, [0] * length, SamplingParams(max_tokens=1000), 0, 1000, frozenset())


def held_pages(cache: PagedCacheManager) -> int:
    stats = cache.stats()
    assert stats.usage == pytest.approx(1 - stats.free_pages / stats.num_pages)
    return stats.num_pages - stats.free_pages


def compute(cache: PagedCacheManager, *picks: tuple[Req, int]) -> None:
    """What a step does to the lengths: the positions of each pick, then a new token where the last one was computed."""
    batch = Batch.build(picks, cache.allocate(picks))
    cache.commit(batch)
    for req in batch.sampled:
        req.device_len += 1


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_request_holds_as_many_pages_as_its_positions_need(page_size):
    """Page edges: a prompt that ends on one takes no page too many, and the first position past it takes the next."""
    for length in range(1, 3 * page_size + 2):
        cache, req = make_cache(100 // page_size, page_size), make_req(0, length)
        assert cache.admit(req)
        assert held_pages(cache) == 0
        compute(cache, (req, length))
        for positions in range(length, length + 2 * page_size + 2):
            assert req.cached_len == positions
            assert held_pages(cache) == -(-positions // page_size)
            cache.check_integrity()
            compute(cache, (req, 1))
        cache.release(req)
        cache.check_integrity()
        assert cache.stats().usage == 0


def test_a_chunk_takes_pages_for_itself_alone():
    cache, req = make_cache(10, 4), make_req(0, 30)
    assert cache.admit(req)
    for n, pages in [(3, 1), (1, 1), (1, 2), (8, 4), (17, 8)]:
        compute(cache, (req, n))
        assert held_pages(cache) == pages


def test_allocate_is_all_or_nothing():
    cache, big, *reqs = make_cache(12, 4), make_req(0, 12), make_req(1, 8), make_req(2, 8)
    assert cache.admit(big)  # and it takes nothing yet
    for req in reqs:
        assert cache.admit(req)
        compute(cache, (req, 8))
    for _ in range(8):
        compute(cache, (reqs[0], 1), (reqs[1], 1))
    table = cache.page_table.host.copy()
    with pytest.raises(OutOfPages, match="5 pages wanted, 4 free"):
        cache.allocate([(reqs[0], 1), (reqs[1], 1), (big, 12)])
    cache.check_integrity()
    assert held_pages(cache) == 8
    assert np.array_equal(cache.page_table.host, table)
    compute(cache, (reqs[0], 1), (big, 12))
    cache.check_integrity()
    assert held_pages(cache) == 12


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_allocate_may_be_asked_twice(page_size):
    cache, reqs = make_cache(60, page_size), [make_req(uid, length) for uid, length in enumerate((5, 1, 8))]
    for req in reqs:
        assert cache.admit(req)
        cache.allocate([(req, req.extend_len)])
    table, held = cache.page_table.host.copy(), held_pages(cache)
    table_idx = cache.allocate([(req, req.extend_len) for req in reqs]).tolist()
    assert cache.allocate([(reqs[2], 3)]) == table_idx[2:]  # fewer positions than it has pages for
    assert held_pages(cache) == held == sum(-(-n // page_size) for n in (5, 1, 8))
    assert np.array_equal(cache.page_table.host, table)
    assert len(table_idx) == len(set(table_idx)) == 3
    cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("running", [1, 2, 3])
def test_admission_leaves_head_room_for_running_requests(page_size, running):
    """All known tokens of the newcomer and RESERVE tokens for every running request must fit, or it waits."""
    length = 10
    pages = -(-length // page_size)
    needed = running * pages + pages + running * -(-RESERVE // page_size)
    for spare in (0, -1):
        cache = make_cache(needed + spare, page_size)
        for uid in range(running):
            req = make_req(uid, length)
            assert cache.admit(req)
            compute(cache, (req, length))
        assert cache.admit(make_req(running, length)) == (spare == 0)
        cache.check_integrity()
        assert held_pages(cache) == running * pages


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_largest_request_is_admitted_to_an_empty_pool(page_size):
    cache = make_cache(5, page_size)
    assert cache.max_len == 5 * page_size
    req = make_req(0, 5 * page_size)
    assert cache.admit(req)
    cache.allocate([(req, 5 * page_size)])
    assert cache.stats().usage == 1


def test_no_more_requests_than_the_table_has_rows():
    cache, reqs = make_cache(1000, 1, max_running=2), [make_req(uid, 1) for uid in range(3)]
    assert cache.stats().free_requests == 2
    assert [cache.admit(req) for req in reqs] == [True, True, False]
    assert cache.stats().free_requests == 0
    cache.release(reqs[0])
    assert cache.admit(reqs[2])
    cache.check_integrity()


def test_an_admitted_request_starts_from_zero():
    cache, req = make_cache(10, 4), make_req(0, 9)
    assert cache.admit(req)
    compute(cache, (req, 9))
    assert req.cached_len == 9
    cache.release(req)
    assert cache.admit(req)
    assert (req.cached_len, req.extend_len) == (0, 10)


def test_the_pages_of_a_dropped_row_are_the_callers_own():
    cache, reqs = make_cache(10, 4, max_running=1), [make_req(uid, 9) for uid in range(2)]
    assert cache.admit(reqs[0])
    compute(cache, (reqs[0], 9))
    pages = cache.drop_row(reqs[0])
    kept = pages.tolist()
    assert cache.admit(reqs[1])  # into the same row
    compute(cache, (reqs[1], 9))
    assert pages.tolist() == kept
    cache.allocator.free(pages)
    cache.check_integrity()


def repeat_a_page(cache: PagedCacheManager) -> None:
    row = cache.page_table.host[cache.table_idx[0]]
    row[0] = row[1]


SPOILERS = {
    "the mirror differs": lambda cache: cache.page_table.device.add_(1),
    "a page lost": lambda cache: cache.allocator.alloc(1),
    "a page twice in the table": repeat_a_page,
    "a page free and in use": lambda cache: cache.allocator.free(cache.page_table.host[cache.table_idx[0], :1]),
    "a row lost": lambda cache: cache.free_table_idx.pop(),
    "a row free and in use": lambda cache: cache.free_table_idx.append(cache.table_idx[0]),
}


@pytest.mark.parametrize("damage", SPOILERS)
def test_the_integrity_check_sees(damage):
    cache, req = make_cache(10, 4), make_req(0, 9)
    assert cache.admit(req)
    compute(cache, (req, 9))
    cache.check_integrity()
    SPOILERS[damage](cache)
    with pytest.raises(AssertionError, match=" ".join(damage.split()[:2])):
        cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_position_has_a_slot_of_its_own(build, llama, page_size):
    """What attention looks up: the slots of all cached positions of all requests. None twice, and none changes."""
    engine = build(page_size, kv_tokens=96, max_batch_tokens=9)
    pool, cache = engine.runner.runner.attention.pool, engine.cache
    uids = [engine.add(llama.prompt(n), greedy(12)) for n in (20, 7, 3)]
    known = {}
    for _ in range(20):
        step(engine)
        seen = []
        for req in engine.scheduler.running:
            positions = np.arange(req.cached_len)
            slots = cache.page_table.slots(np.full_like(positions, cache.table_idx[req.uid]), positions).tolist()
            before = known.get(req.uid, [])
            assert slots[: len(before)] == before
            known[req.uid] = slots
            seen += slots
        assert len(set(seen)) == len(seen)
        assert all(0 <= slot < pool.num_tokens for slot in seen)
    assert sorted(known) == uids
    assert not engine.has_work()


# --- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("budget", [7, 512])
def test_the_text_does_not_depend_on_the_page_size(build, llama, page_size, budget):
    engine = build(page_size, kv_tokens=512, max_batch_tokens=budget)
    poison_freed_pages(engine)
    for jobs in ([*JOBS.items()], [*JOBS.items()][::-1]):
        reqs = engine.generate([llama.prompt(length) for length, _ in jobs], [greedy(n) for _, n in jobs])
        assert [req.output_ids for req in reqs] == [reference(llama, llama.prompt(length), n) for length, n in jobs]
        assert engine.stats().usage == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_prompts_that_end_at_a_page_edge(build, llama, page_size, length):
    (req,) = build(page_size).generate([llama.prompt(length)], greedy(18))
    assert req.output_ids == reference(llama, llama.prompt(length), 18)


# --- retraction -------------------------------------------------------------------------------------------------


def steps_of(engine) -> list[list]:
    """What each step has computed, as rows of the trace."""
    return [list(rows) for _, rows in groupby(engine.runner.rows, lambda row: row.step)]


def starts_of(engine) -> list[int]:
    """The uids of the requests that began at the first position, in the order of the steps; a retracted one comes again."""
    return [row.uid for row in engine.runner.rows if row.cached_len == 0]


def serve(engine, prompts, params) -> dict[int, list]:
    """Run the prompts with pages poisoned as soon as they are free; uid -> outputs. Nothing may be left in the pool."""
    poison_freed_pages(engine)
    for prompt, p in zip(prompts, params, strict=True):
        engine.add(prompt, p)
    outputs = run(engine)
    assert engine.stats().usage == 0
    return outputs


def test_which_request_gives_way_and_when(build, llama):
    """Twelve pages of 4. Two prompts of 8 tokens get in and fill six pages each; then the younger one waits for the end
    of the older one, starts over with its 25 tokens, and still comes before the third, which has no room beside it.
    """
    engine = build(page_size=4, kv_tokens=48)
    prompts = [llama.prompt(8, i) for i in range(3)]
    outputs = serve(engine, prompts, [greedy(24)] * 3)
    assert engine.scheduler.num_retracted == 1
    steps = {uid: [row.step for row in engine.runner.rows if row.uid == uid] for uid in range(3)}
    assert steps[0] == [*range(24)]
    assert steps[1] == [*range(17), *range(24, 31)]
    assert [row.extend_len for row in engine.runner.rows if row.uid == 1] == [8, *[1] * 16, 25, *[1] * 6]
    assert steps[2] == [*range(31, 55)]
    for uid, prompt in enumerate(prompts):
        assert tokens(outputs[uid]) == reference(llama, prompt, 24)
        assert reasons(outputs[uid]) == [None] * 23 + ["max_tokens"]


@pytest.mark.parametrize("budget", [1, 9, 512])
@pytest.mark.parametrize(("page_size", "kv_tokens"), [(1, 50), (3, 60), (4, 64), (16, 112)])
def test_the_oldest_go_on_and_the_text_is_the_same(build, llama, page_size, kv_tokens, budget):
    """In every step the requests that compute are the oldest that have not ended: the victim is the youngest, goes to
    the head of the queue, and none overtakes it.
    """
    engine = build(page_size, kv_tokens, max_batch_tokens=budget)
    jobs = [(1, 40), (5, 30), (2, 24), (9, 38), (1, 30), (17, 25), (4, 36), (16, 8), (3, 40)]
    prompts = [llama.prompt(length) for length, _ in jobs]
    outputs = serve(engine, prompts, [greedy(n) for _, n in jobs])
    for uid, (prompt, (_, n)) in enumerate(zip(prompts, jobs, strict=True)):
        assert tokens(outputs[uid]) == reference(llama, prompt, n)
        assert reasons(outputs[uid]) == [None] * (n - 1) + ["max_tokens"]
    unfinished, left = [*range(len(jobs))], dict(enumerate(n for _, n in jobs))
    for rows in steps_of(engine):
        assert sorted(row.uid for row in rows) == unfinished[: len(rows)]
        for row in rows:
            left[row.uid] -= row.samples
        unfinished = [uid for uid in unfinished if left[uid]]
    assert engine.scheduler.num_retracted == len(starts_of(engine)) - len(jobs)
    assert engine.scheduler.num_retracted > 0 or budget == 1  # one token a step: one request at a time


@pytest.mark.parametrize("cause", ["a call", "no pages"])
def test_a_request_retracted_in_a_step_is_not_admitted_in_that_step(build, llama, monkeypatch, cause):
    """Nor is any other, though there is room for all: the token of the victim may still be on its way to the host."""
    engine = build(kv_tokens=400)
    going, victim = engine.add(llama.prompt(5), greedy(9)), engine.add(llama.prompt(8), greedy(6))
    outputs = step(engine) + step(engine)
    late, allocate = engine.add(llama.prompt(3), greedy(4)), engine.cache.allocate

    def too_little_for_two(picks):
        if len(picks) == 2 and not engine.stats().retracted:
            raise OutOfPages
        return allocate(picks)

    if cause == "a call":
        engine.scheduler.retract()
    else:
        monkeypatch.setattr(engine.cache, "allocate", too_little_for_two)
    outputs += step(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.retracted) == (1, 2, 1)
    outputs += step(engine)
    assert (engine.stats().running, engine.stats().waiting) == (3, 0)
    uids = [[row.uid for row in rows] for rows in steps_of(engine)]
    assert (uids[2], sorted(uids[3])) == ([going], [going, victim, late])
    assert starts_of(engine) == [going, victim, victim, late]
    outputs += [output for more in run(engine).values() for output in more]
    for uid, length, n in ((going, 5, 9), (victim, 8, 6), (late, 3, 4)):
        mine = [output for output in outputs if output.uid == uid]
        assert tokens(mine) == reference(llama, llama.prompt(length), n)


def test_the_only_request_may_be_retracted(build, llama):
    """Then the step computes nothing, and the next one goes on."""
    engine = build()
    uid = engine.add(llama.prompt(8), greedy(6))
    outputs = step(engine) + step(engine)
    engine.scheduler.retract()
    assert step(engine) == []
    assert engine.has_work()
    assert tokens(outputs + run(engine)[uid]) == reference(llama, llama.prompt(8), 6)


KINDS = {
    "greedy": {},
    "seed": {"temperature": 0.9, "seed": 7},
    "no seed": {"temperature": 1.1, "top_p": 0.9, "top_k": 30},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 3, "logit_bias": {4: 2.0}},
    "greedy, penalties": {"repetition_penalty": 1.5, "logprobs": 0},
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_retracted_request_goes_on_to_the_same_text(build, llama, kind, page_size):
    prompts, params = [llama.prompt(8, i) for i in range(2)], [greedy(24), SamplingParams(max_tokens=24, **KINDS[kind])]
    _, expected = build_stage2(llama.config(max_model_len=128)).generate(prompts, params)
    engine = build(page_size, kv_tokens=48)
    poison_freed_pages(engine)
    _, req = engine.generate(prompts, params)
    assert starts_of(engine) == [0, 1, 1]
    assert (req.output_ids, req.finish_reason) == (expected.output_ids, "max_tokens")
    assert len(req.logprobs) == (24 if "logprobs" in KINDS[kind] else 0)
    for entry, other in zip(req.logprobs, expected.logprobs, strict=True):
        assert entry.chosen == pytest.approx(other.chosen, abs=1e-3)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_that_holds_one_request_serves_them_one_by_one(build, llama, page_size):
    engine = build(page_size, kv_tokens=32)
    jobs = [(20, 13), (25, 8), (32, 1), (1, 32)]  # each fills the pool to its last slot
    outputs = serve(engine, [llama.prompt(length) for length, _ in jobs], [greedy(n) for _, n in jobs])
    for uid, (length, n) in enumerate(jobs):
        assert tokens(outputs[uid]) == reference(llama, llama.prompt(length), n)
        assert reasons(outputs[uid]) == [None] * (n - 1) + ["max_tokens"]


# --- what the pool can't hold -----------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_and_nothing_changes(build, llama):
    engine = build(page_size=16, kv_tokens=40)  # two pages
    first = engine.add(llama.prompt(5), greedy(3))
    before = vars(engine.stats()).copy()
    with pytest.raises(UserError, match=r"33 tokens.* room for 32"):
        engine.add(llama.prompt(33), greedy(1))
    with pytest.raises(UserError, match=r"33 tokens.* room for 32"):
        engine.add(llama.prompt(33), greedy(1))
    assert vars(engine.stats()) == before
    second = engine.add(llama.prompt(32), greedy(1))
    assert second == first + 1
    outputs = run(engine)
    assert tokens(outputs[first]) == reference(llama, llama.prompt(5), 3)
    assert tokens(outputs[second]) == reference(llama, llama.prompt(32), 1)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_request_that_outgrows_the_whole_pool_ends_by_length(build, llama, page_size):
    """As many tokens as the pool has slots, and one more, which needs none; beside others that are in its way."""
    slots = 40 // page_size * page_size
    engine = build(page_size, kv_tokens=40)
    prompts = [llama.prompt(n) for n in (10, 3, 1)]
    outputs = serve(engine, prompts, [greedy(100), greedy(100), greedy(20)])
    for uid, length in enumerate((10, 3)):
        n = slots - length + 1
        assert tokens(outputs[uid]) == reference(llama, prompts[uid], n)
        assert reasons(outputs[uid]) == [None] * (n - 1) + ["length"]
    assert tokens(outputs[2]) == reference(llama, prompts[2], 20)


@pytest.mark.parametrize(("page_size", "kv_tokens"), [(4, 3), (256, 255)])
def test_a_pool_without_a_page_is_refused_in_words(llama, page_size, kv_tokens):
    with pytest.raises(UserError, match=f"page of {page_size} tokens.*--kv-tokens"):
        build_engine(llama.config(page_size=page_size, kv_tokens=kv_tokens))


def test_the_pool_says_what_it_took(llama, capsys):
    build_engine(llama.config(page_size=16, kv_tokens=10_015))
    # 2 x 2 layers x 2 heads x 8 x 4 bytes per token
    assert capsys.readouterr().err == f"KV pool: 10,000 tokens in 625 pages of 16, {10_000 * 256 / 2**30:.2f} GiB\n"


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4, 5, 16])
def test_usage_is_the_share_of_pages_held(build, llama, page_size):
    """The last page of each request is part empty: that is all the waste there is."""
    engine = build(page_size, kv_tokens=240)
    engine.add(llama.prompt(5), greedy(4))
    for held in {1: [5, 6, 7], 3: [2, 2, 3], 4: [2, 2, 2], 5: [1, 2, 2], 16: [1, 1, 1]}[page_size]:
        step(engine)
        (req,) = engine.scheduler.running
        assert engine.stats().usage == pytest.approx(held / (240 // page_size))
        assert 0 <= held * page_size - req.cached_len < page_size
    step(engine)
    assert engine.stats().usage == 0


def test_stats_of_a_retraction(build, llama):
    """Positions that are computed again are counted again; tokens are not."""
    engine = build(page_size=4, kv_tokens=48)
    for i in range(2):
        engine.add(llama.prompt(8, i), greedy(24))
    for _ in range(18):
        step(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.usage) == (1, 1, pytest.approx(7 / 12))
    run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.computed_tokens, stats.output_tokens) == (31, 2 * 31 + 24, 48)


# --- abort ------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(build, llama):
    """An engine with 0 decoding, 1 retracted, 2 waiting; and the text of each."""
    engine, outputs = build(page_size=4, kv_tokens=48), {}
    poison_freed_pages(engine)
    prompts = [llama.prompt(8, i) for i in range(3)]
    for prompt in prompts:
        engine.add(prompt, greedy(24))
    for _ in range(18):
        for output in step(engine):
            outputs.setdefault(output.uid, []).append(output)
    assert (engine.stats().running, engine.stats().waiting, sorted(outputs)) == (1, 2, [0, 1])
    return engine, outputs, [reference(llama, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("victims", [[0], [1], [2], [0, 1], [1, 0], [1, 2], [2, 1, 0]])
def test_abort_of_a_decoding_a_retracted_and_a_waiting_request(crowd, victims):
    engine, outputs, expected = crowd
    for uid in victims:
        assert engine.abort(uid)
        assert not engine.abort(uid)
        engine.cache.check_integrity()
    for uid, more in run(engine).items():
        assert uid not in victims
        outputs.setdefault(uid, []).extend(more)
    for uid in {0, 1, 2} - set(victims):
        assert tokens(outputs[uid]) == expected[uid]
    assert engine.stats().usage == 0


def test_abort_of_a_half_prefilled_request(build, llama):
    engine = build(page_size=4, kv_tokens=96, max_batch_tokens=8)
    poison_freed_pages(engine)
    going, half, waiting = (engine.add(llama.prompt(n), greedy(6)) for n in (5, 40, 7))
    outputs = step(engine) + step(engine)
    assert [output.uid for output in outputs] == [going, going]
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    assert engine.abort(half)
    engine.cache.check_integrity()
    assert engine.stats().usage == pytest.approx(2 / 24)
    rest = run(engine)
    assert tokens(outputs + rest[going]) == reference(llama, llama.prompt(5), 6)
    assert tokens(rest[waiting]) == reference(llama, llama.prompt(7), 6)
    assert half not in rest


def test_abort_while_the_step_is_under_way(build, llama):
    """Between launch and collect: the token is dropped, even if it would have been the last, and the pages are free."""
    engine = build(page_size=4, kv_tokens=96)
    poison_freed_pages(engine)
    last, going, other = (engine.add(llama.prompt(n), greedy(k)) for n, k in ((5, 2), (6, 9), (7, 8)))
    outputs = step(engine)
    batch = engine.scheduler.schedule()
    samples = engine.launch(batch)
    assert engine.abort(last)
    assert engine.abort(going)
    engine.cache.check_integrity()
    more = engine.collect(batch, samples)
    assert [output.uid for output in more] == [other]
    rest = run(engine)
    assert set(rest) == {other}
    everything = [output for output in outputs if output.uid == other] + more + rest[other]
    assert tokens(everything) == reference(llama, llama.prompt(7), 8)
    assert engine.stats().usage == 0


@pytest.mark.parametrize(("running", "length", "budget"), [(1, 64, 512), (2, 64, 64), (5, 64, 7), (16, 8, 16)])
def test_the_largest_step_is_one_that_there_may_be(monkeypatch, running, length, budget):
    """Many positions for few requests: no more than each may have."""
    sizes = {"max_running": running, "max_model_len": length, "max_batch_tokens": budget}
    m = load(EngineConfig("dummy:tiny", device="cpu", dtype="float32", **sizes))
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 31))
    steps = []
    m.model.register_forward_pre_hook(lambda _, args: steps.append(len(args[0])))
    assert measure_room(m)[0] == int(0.9 * 2**31) - 2**30
    assert min(budget, running * length) <= steps[0] <= running * length
