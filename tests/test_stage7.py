"""Stage 7: what was computed once is found again, and the text is the same.

The cache manager first, driven by hand: which page has which owner, what is let in, what is left behind. Then the whole
engine: families of prompts in pools so small that pages are evicted and requests retracted all the time, freed pages
poisoned.
"""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config import EngineConfig
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage5_paged.page_allocator import OutOfPages
from stage7_radix.build import build_engine
from stage7_radix.cache import RadixCacheManager
from stage7_radix.params import RequestParams
from tests.conftest import reference
from tests.histories import History

CPU = torch.device("cpu")
SEEDS = 60 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 3


# --- the cache manager by hand ----------------------------------------------------------------------------------


def make_cache(num_pages: int, page_size: int, max_running: int = 4, reserve: int = 0) -> RadixCacheManager:
    cache = RadixCacheManager(num_pages, page_size, max_running, 1000, CPU)
    cache.reserve = reserve
    return cache


def make_req(uid: int, tokens, salt: str = "") -> Req:
    return Req(uid, list(tokens), RequestParams(max_tokens=1000, cache_salt=salt), 0, 1000, frozenset())


def compute(cache: RadixCacheManager, *picks: tuple[Req, int], seen: bool = True) -> None:
    """A step, after which every request that was computed to its end has token 9 more (which the host may not see yet)."""
    batch = Batch.build(picks, cache.allocate(picks))
    cache.commit(batch)
    for req in batch.sampled:
        req.device_len += 1
        if seen:
            req.token_ids.append(9)
    cache.check_integrity()


def serve(cache: RadixCacheManager, req: Req, new_tokens: int = 1) -> Req:
    """Admit it alone, compute it, let it go."""
    assert cache.admit(req)
    compute(cache, (req, req.extend_len))
    for _ in range(new_tokens - 1):
        compute(cache, (req, 1))
    cache.release(req)
    cache.check_integrity()
    return req


def in_use(cache: RadixCacheManager) -> int:
    """Pages that can't be had now."""
    stats = cache.stats()
    assert stats.usage == pytest.approx(1 - stats.free_pages / stats.num_pages)
    return stats.num_pages - stats.free_pages


def pages_of(cache: RadixCacheManager, req: Req, count: int) -> list[int]:
    """Its first pages."""
    return cache.page_table.host[cache.table_idx[req.uid], :count].tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_a_request_that_is_done_leaves_full_pages_and_the_next_finds_them(page_size, length):
    cache = make_cache(100, page_size)
    serve(cache, make_req(0, range(length)))
    assert cache.tree.num_pages == length // page_size
    assert cache.allocator.num_free == 100 - length // page_size
    assert in_use(cache) == 0
    again = serve(cache, make_req(1, range(length)))
    assert again.cached_tokens == (length - 1) // page_size * page_size  # one position must be computed
    assert cache.tree.num_pages == length // page_size
    longer = serve(cache, make_req(2, [*range(length), 77]))
    assert longer.cached_tokens == length // page_size * page_size
    other = serve(cache, make_req(3, [99, *range(length)]))
    assert other.cached_tokens == 0
    assert cache.stats().hit_tokens == again.cached_tokens + longer.cached_tokens
    assert cache.stats().prompt_tokens == 4 * length + 2


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_same_prompt_twice_when_it_ends_on_a_page_edge(page_size):
    """The second one computes its last page again beside the tree's, and gives one of the two back."""
    cache, first, second = make_cache(20, page_size), make_req(0, range(8)), make_req(1, range(8))
    assert cache.admit(first)
    compute(cache, (first, 8))
    assert cache.admit(second)
    assert second.cached_len == 8 - page_size
    compute(cache, (first, 1), (second, page_size))
    cache.release(first)
    cache.release(second)
    cache.check_integrity()
    assert cache.tree.num_pages == 8 // page_size + (page_size == 1)
    assert in_use(cache) == 0


def test_two_equal_prompts_in_one_step_share_from_then_on():
    cache, first, second = make_cache(20, 4), make_req(0, range(10)), make_req(1, range(10))
    assert cache.admit(first)
    assert cache.admit(second)
    assert second.cached_len == 0
    compute(cache, (first, 10), (second, 10))
    pages = [pages_of(cache, req, 3) for req in (first, second)]
    assert pages[0][:2] == pages[1][:2]
    assert pages[0][2] != pages[1][2]
    assert in_use(cache) == 4
    cache.release(first)  # whose pages they were
    assert in_use(cache) == 3
    for req in (make_req(i, [50 + i]) for i in range(2, 4)):
        assert cache.admit(req)
        compute(cache, (req, 1))
    assert pages_of(cache, second, 3) == pages[1]
    cache.release(second)
    cache.check_integrity()


def test_a_prompt_under_way_can_be_shared_chunk_by_chunk():
    cache, first, second = make_cache(20, 2), make_req(0, range(10)), make_req(1, range(9))
    assert cache.admit(first)
    compute(cache, (first, 5))
    assert cache.admit(second)
    assert second.cached_len == 4
    compute(cache, (first, 5), (second, 5))
    assert pages_of(cache, first, 4) == pages_of(cache, second, 4)
    assert in_use(cache) == 6


def test_a_conversation_finds_its_own_answers():
    cache = make_cache(40, 4)
    turn = serve(cache, make_req(0, range(10)), new_tokens=9)
    assert len(turn.token_ids) == 19
    assert cache.tree.num_pages == 18 // 4  # the last token has no slot
    turn = serve(cache, make_req(1, [*turn.token_ids, 1, 2, 3]))
    assert turn.cached_tokens == 16


def test_half_of_a_hit_may_be_evicted_meanwhile():
    cache = make_cache(8, 2)
    serve(cache, make_req(0, range(12)))
    filler = make_req(1, range(100, 110))
    serve(cache, filler)  # takes two free pages and three of the six
    again = serve(cache, make_req(2, range(12)))
    assert again.cached_tokens == 6


def test_abort_of_the_only_holder_leaves_the_prefix_to_others():
    cache, holder = make_cache(6, 2), make_req(0, range(8))
    assert cache.admit(holder)
    compute(cache, (holder, 5))
    assert in_use(cache) == 3
    cache.release(holder)
    cache.check_integrity()
    assert (in_use(cache), cache.tree.num_pages) == (0, 2)
    assert serve(cache, make_req(1, range(8))).cached_tokens == 4
    assert serve(cache, make_req(2, range(50, 62))).cached_tokens == 0  # needs all pages


def test_stale_prefixes_count_as_room_and_no_more_is_evicted_than_needed():
    cache = make_cache(10, 1)
    serve(cache, make_req(0, range(9)))
    assert (cache.allocator.num_free, cache.available()) == (1, 10)
    req = make_req(1, range(20, 24))
    assert cache.admit(req)
    assert cache.tree.num_pages == 9  # taken when it is needed
    compute(cache, (req, 4))
    assert cache.tree.num_pages == 6 + 4
    assert cache.tree.match_len(range(9)) == 6


def test_what_a_newcomer_is_going_to_use_is_not_evicted_for_it():
    cache, runs = make_cache(6, 1), make_req(0, [80, 81])
    serve(cache, make_req(1, [1, 2, 3]))
    assert cache.admit(runs)
    compute(cache, (runs, 2))
    assert cache.available() == 4
    newcomer = make_req(2, [1, 2, 3, 4, 5, 6])  # three found, three needed, one free
    assert not cache.admit(newcomer)
    cache.check_integrity()
    assert cache.available() == 4
    assert cache.tree.match_len([1, 2, 3]) == 3
    assert newcomer.cached_tokens is None
    assert cache.stats().prompt_tokens == 3 + 2
    cache.release(runs)
    assert serve(cache, newcomer).cached_tokens == 3


@pytest.mark.parametrize("spare", [0, -1])
def test_what_others_hold_already_costs_a_newcomer_nothing(spare):
    """Four pages for the one that runs; four more, two of them shared, for the newcomer; and head-room."""
    cache, runs = make_cache(6 + 2 + spare, 4, reserve=5), make_req(0, range(15))
    newcomer = make_req(1, [*range(8), 50, 51, 52, 53, 54])
    assert cache.admit(runs)
    compute(cache, (runs, 15))
    assert cache.admit(newcomer) == (spare == 0)
    cache.check_integrity()
    if spare == 0:
        compute(cache, (runs, 1), (newcomer, newcomer.extend_len))
        assert in_use(cache) == 6


def test_allocate_takes_nothing_if_all_that_can_be_evicted_is_not_enough():
    cache, big, runs = make_cache(8, 1), make_req(0, range(6)), make_req(1, [50, 51, 52])
    serve(cache, make_req(2, [70, 71]))
    assert cache.admit(big)
    assert cache.admit(runs)
    compute(cache, (runs, 3))
    with pytest.raises(OutOfPages, match="6 pages wanted"):
        cache.allocate([(big, 6)])
    cache.check_integrity()
    assert cache.tree.match_len([70, 71]) == 2


def test_a_token_that_the_host_has_not_seen_stays_out_of_the_tree():
    cache, req = make_cache(20, 2), make_req(0, range(5))
    assert cache.admit(req)
    compute(cache, (req, 5), seen=False)
    compute(cache, (req, 1), seen=False)  # the position of the token that is on the device only
    assert req.cached_len == 6 > len(req.token_ids)
    cache.release(req)
    cache.check_integrity()
    assert cache.tree.num_pages == 2
    assert in_use(cache) == 0


def test_the_retracted_hits_its_own_prefix_and_counts_once():
    cache, req = make_cache(20, 2), make_req(0, range(6))
    assert cache.admit(req)
    compute(cache, (req, 6))
    compute(cache, (req, 1))
    cache.release(req)
    assert cache.admit(req)
    assert (req.cached_len, req.extend_len) == (6, 2)
    assert (req.cached_tokens, cache.stats().hit_tokens, cache.stats().prompt_tokens) == (0, 0, 6)


def test_only_equal_salts_share():
    cache = make_cache(100, 2)
    serve(cache, make_req(0, range(9), "a"))
    assert serve(cache, make_req(1, range(9), "b")).cached_tokens == 0
    assert serve(cache, make_req(2, range(9))).cached_tokens == 0
    assert serve(cache, make_req(3, range(9), "a")).cached_tokens == 8
    plain = Req(4, list(range(9)), SamplingParams(max_tokens=5), 0, 1000, frozenset())
    assert serve(cache, plain).cached_tokens == 8  # as the one with the empty salt


def free_a_shared_page(cache):
    cache.allocator.free(cache.page_table.host[cache.table_idx[1], :1].copy())


def point_elsewhere(cache):
    """Two entries of the part that is the tree's: every page still has one owner."""
    row = cache.table_idx[1]
    cache.page_table.write(np.full(2, row), np.arange(2), cache.page_table.host[row, :2][::-1].copy())


SPOILERS = {
    "lost or owned twice": free_a_shared_page,
    "not the tree's": point_elsewhere,
    "handle": lambda cache: cache.handles.update({5: cache.tree.root}),
    "locks differ": lambda cache: cache.tree.unlock(cache.handles[1]),
    "miscounted": lambda cache: setattr(cache.tree, "num_pages", 0),
}


@pytest.mark.parametrize("damage", SPOILERS)
def test_the_integrity_check_sees(damage):
    cache, req = make_cache(20, 2), make_req(1, range(9))
    serve(cache, make_req(0, range(9)))
    assert cache.admit(req)
    compute(cache, (req, 1))
    SPOILERS[damage](cache)
    with pytest.raises(AssertionError, match=damage):
        cache.check_integrity()


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 60), (1, 12), (4, 20), (16, 7), (16, 3)])
def test_a_thousand_random_operations_leak_nothing(page_size, num_pages):
    """Requests come, grow by chunks and go, in any order. Then all that is held or remembered can be had again."""
    rng, cache = random.Random(page_size * num_pages), make_cache(num_pages, page_size, max_running=3)
    live, uid, evicted = [], 0, 0
    for _ in range(1000):
        action = rng.random()
        if action < 0.35:
            length = rng.randint(1, num_pages * page_size * 2 // 3)
            cut = rng.choice([0, length // 2, length])
            tokens = [*range(cut), *(rng.randint(0, 1) for _ in range(length - cut))]
            uid += 1
            req = make_req(uid, tokens, rng.choice(["", "", "a"]))
            if cache.admit(req):
                live.append(req)
        elif action < 0.8 and live:
            picks = [(req, rng.randint(1, req.extend_len)) for req in live if rng.random() < 0.7]
            before = cache.tree.num_pages
            try:
                if picks:
                    compute(cache, *picks, seen=rng.random() < 0.5)
            except OutOfPages:
                cache.release(live.pop())
            evicted += before > cache.tree.num_pages
            for req in live:  # late, but before the next step
                req.token_ids += [9] * (req.device_len - len(req.token_ids))
        elif live:
            cache.release(live.pop(rng.randrange(len(live))))
        cache.check_integrity()
    assert evicted
    assert cache.stats().hit_tokens
    for req in live:
        cache.release(req)
    cache.check_integrity()
    assert cache.stats().usage == 0
    assert len(cache.take(num_pages)) == num_pages
    assert cache.tree.num_pages == 0
    assert not cache.handles


# --- the engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


def small(llama, **changes) -> EngineConfig:
    defaults = {"page_size": 4, "kv_tokens": 400, "max_batch_tokens": 64, "max_running": 5, "max_model_len": 80}
    return llama.config(**defaults | changes)


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def poison_freed_pages(engine) -> None:
    """Fill every page with large values now, and again whenever it is freed."""
    cache, eager = engine.cache, getattr(engine.runner, "eager", engine.runner)
    pool, free = eager.attention.pool, cache.allocator.free

    def poison(pages) -> None:
        slots = torch.as_tensor(pages).long()[:, None] * cache.page_size + torch.arange(cache.page_size)
        for layer in (*pool.k, *pool.v):
            layer[slots.flatten()] = 1e3

    def poison_and_free(pages) -> None:
        poison(pages)
        free(pages)

    poison(cache.allocator.free_pages().copy())
    cache.allocator.free = poison_and_free


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_hit_is_not_computed_again(llama, page_size, overlap):
    engine = build_engine(small(llama, page_size=page_size, kv_tokens=512, overlap=overlap))
    prompt = llama.prompt(64)
    for i in range(3):
        before = engine.stats().computed_tokens
        (req,) = engine.generate([prompt], greedy(8))
        assert req.output_ids == reference(llama, prompt, 8)
        assert req.cached_tokens == (63 // page_size * page_size if i else 0)
        assert engine.stats().computed_tokens - before == 64 - req.cached_tokens + 7
    assert engine.stats().usage == 0


def test_without_radix_everything_is_computed(llama):
    engine = build_engine(small(llama, radix=False))
    for _ in range(2):
        before = engine.stats().computed_tokens
        (req,) = engine.generate([llama.prompt(64)], greedy(8))
        assert req.output_ids == reference(llama, llama.prompt(64), 8)
        assert engine.stats().computed_tokens - before == 64 + 7


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_equal_prompts_side_by_side(llama, overlap):
    """In one step: computed twice, kept once. In chunks: the second one follows on the heels of the first."""
    prompt = llama.prompt(40)
    for budget, computed in ((80, 80 + 2 * 7), (20, 40 + 4 + 2 * 7)):
        engine = build_engine(small(llama, max_batch_tokens=budget, overlap=overlap))
        poison_freed_pages(engine)
        reqs = engine.generate([prompt] * 2, greedy(8))
        assert [req.output_ids for req in reqs] == [reference(llama, prompt, 8)] * 2
        assert engine.stats().computed_tokens == computed
        assert engine.cache.tree.num_pages == 47 // 4


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_conversation_computes_only_what_is_new(llama, page_size, overlap):
    engine = build_engine(small(llama, page_size=page_size, overlap=overlap))
    history = llama.prompt(9)
    for turn in range(4):
        before = engine.stats().computed_tokens
        (req,) = engine.generate([history], greedy(9))
        assert req.output_ids == reference(llama, history, 9)
        known = (len(history) - 6 if turn else 0) // page_size * page_size  # the last answer's last token has no slot
        assert engine.stats().computed_tokens - before == len(history) - known + 8
        history = req.token_ids + llama.prompt(5, turn)


def test_salts_keep_tenants_apart(llama):
    engine = build_engine(small(llama))
    prompt = llama.prompt(40)
    hits = []
    for salt in ("a", "b", "a", "", ""):
        (req,) = engine.generate([prompt], RequestParams(max_tokens=4, cache_salt=salt))
        assert req.output_ids == reference(llama, prompt, 4)
        hits.append(req.cached_tokens)
    assert hits == [0, 0, 36, 0, 36]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_a_pool_of_two_pages(llama, page_size, overlap):
    """The largest request takes all of it, evicts whatever was there, and finds it again if it was itself."""
    engine = build_engine(small(llama, page_size=page_size, kv_tokens=2 * page_size, overlap=overlap))
    poison_freed_pages(engine)
    prompts = [llama.prompt(n, seed) for n in {1, page_size, 2 * page_size} for seed in (0, 0, 1)]
    reqs = engine.generate(prompts, greedy(5))
    for prompt, req in zip(prompts, reqs, strict=True):
        room = 2 * page_size - len(prompt) + 1
        assert req.output_ids == reference(llama, prompt, 5)[:room]
    assert engine.stats().usage == 0


def test_retracted_with_the_last_token_under_way(llama):
    """Nothing is left to compute: it waits for the token and is done."""
    engine = build_engine(small(llama))
    uid = engine.add(llama.prompt(10), greedy(3))
    outputs = [engine.step() for _ in range(3)]
    (req,) = engine.scheduler.running
    assert req.extend_len == 0
    engine.scheduler.retract()
    outputs.append(engine.step())
    assert [len(step) for step in outputs] == [0, 1, 1, 1]
    assert (outputs[-1][0].uid, outputs[-1][0].finish_reason) == (uid, "max_tokens")
    assert not engine.has_work()
    assert req.output_ids == reference(llama, llama.prompt(10), 3)


def test_abort_in_every_phase(llama):
    """Before anything, between the chunks of a prompt, with a token under way, retracted and waiting."""
    prompt, other = llama.prompt(40), llama.prompt(40)[:30] + llama.prompt(5, 1)
    for overlap in (False, True):
        engine = build_engine(small(llama, max_batch_tokens=16, overlap=overlap))
        poison_freed_pages(engine)
        for steps in range(12):
            for retracted in (False, True):
                uid, beside = engine.add(prompt, greedy(8)), engine.add(other, greedy(8))
                outputs = [output for _ in range(steps) for output in engine.step()]
                if retracted and engine.scheduler.running:
                    engine.scheduler.retract()
                if engine.abort(uid):
                    engine.cache.check_integrity()
                while engine.has_work():
                    outputs += engine.step()
                    engine.cache.check_integrity()
                text = [output.token_id for output in outputs if output.uid == beside]
                assert text == reference(llama, other, 8)
                assert engine.stats().usage == 0


# --- random histories -------------------------------------------------------------------------------------------

KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
}
LONGEST = 14


class Families:
    """Prompts that begin alike, some with an earlier answer; and the text that each of them leads to."""

    def __init__(self, llama):
        self.llama, self.stage2, self.texts = llama, build_stage2(llama.config()), {}

    def prompt(self, rng: random.Random) -> list[int]:
        family = self.llama.prompt(24, rng.randint(0, 2))[: rng.choice([4, 8, 15, 16, 17, 24])]
        if rng.random() < 0.3:
            return family + self.text(family, "greedy")[: rng.choice([3, 8])]
        return family + self.llama.prompt(rng.choice([1, 4, 9]), rng.randint(0, 2))[: rng.choice([0, 1, 9])]

    def text(self, prompt: list[int], kind: str) -> list[int]:
        key = tuple(prompt), kind
        if key not in self.texts:
            params = SamplingParams(max_tokens=LONGEST, **KINDS[kind])
            self.texts[key] = self.stage2.generate([prompt], params)[0].output_ids
            if kind == "greedy":
                assert self.texts[key] == reference(self.llama, prompt, LONGEST)
        return self.texts[key]


@pytest.fixture(scope="module")
def families(llama):
    return Families(llama)


def random_history(engine, families: Families, rng: random.Random, requests: int) -> None:
    """Random adds, aborts and retractions between steps; every text is stage 2's, and nothing stays held."""
    history, limit = History(engine, rng), 100 * requests
    while requests or engine.has_work():
        if requests and rng.random() < 0.4:
            prompt, kind = families.prompt(rng), rng.choice(["greedy", *KINDS])
            for _ in range(min(requests, rng.choice([1, 1, 1, 2, 3]))):
                requests -= 1
                n, text = rng.randint(1, LONGEST), families.text(prompt, kind)

                def params(stop, kind=kind, n=n):
                    salt = rng.choice(["", "", "a"])
                    return RequestParams(max_tokens=n, stop_token_ids=stop, cache_salt=salt, **KINDS[kind])

                history.add(prompt, text, n, 0.3, params)
        history.abort_one(0.08)
        if engine.scheduler.running and rng.random() < 0.05:
            engine.scheduler.retract()
        history.step()
        limit -= 1
        assert limit, "no end in sight"
    history.check()
    cache = engine.cache
    assert cache.allocator.num_free + cache.tree.num_pages == cache.allocator.num_pages


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize(("page_size", "budget"), [(1, 16), (4, 5), (4, 64), (16, 64)])
def test_random_histories(llama, families, graph, overlap, page_size, budget):
    config = small(llama, graph=graph, overlap=overlap, page_size=page_size, max_batch_tokens=budget, kv_tokens=96)
    hits = retracted = 0
    for seed in range(SEEDS):
        engine = build_engine(config)
        poison_freed_pages(engine)
        random_history(engine, families, random.Random(seed), 24)
        hits += engine.stats().hit_tokens
        retracted += engine.stats().retracted
    assert hits > 100
    assert retracted


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_gpu_random_histories(llama, families, page_size):
    config = small(llama, device="cuda", page_size=page_size, kv_tokens=max(96, 3 * page_size))
    for seed in range(3):
        random_history(build_engine(config), families, random.Random(seed), 24)


@pytest.mark.gpu
def test_gpu_a_hit_is_read_where_it_lies(llama):
    """Both ways to read it: a prompt's rest against cached pages, and a decode from a graph."""
    engine = build_engine(small(llama, device="cuda", page_size=1))
    prompt = llama.prompt(60)
    for n, hit in ((60, 0), (60, 59), (40, 39)):
        (req,) = engine.generate([prompt[:n]], greedy(8))
        assert (req.output_ids, req.cached_tokens) == (reference(llama, prompt[:n], 8), hit)


@pytest.mark.gpu
def test_gpu_the_tree_never_makes_a_step_wait():
    """Admission of a hit, early sharing, release and eviction enqueue their work like everything else."""
    config = EngineConfig("dummy:tiny", device="cuda", kv_tokens=200, max_running=4, max_model_len=100)
    engine = build_engine(replace(config, attn="triton"))
    prompts = [[*np.random.default_rng(i % 3).integers(0, 500, 60).tolist(), i] for i in range(12)]
    engine.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=10, ignore_eos=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
