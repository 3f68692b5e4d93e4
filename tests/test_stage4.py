"""Stage 4: the same text whatever the budget, the number of regions and the order of arrival; a long prompt delays no
running request's next token and a crowd of short ones does not starve it; regions are handed on clean; an abort leaves
the other requests as they were.
"""

import random
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from common.config import UserError
from common.kernels import portable
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage2_req.trace import TracedRunner
from stage4_batch.attention import PagedAttention
from stage4_batch.build import build_engine
from stage4_batch.cache import FixedCacheManager
from stage4_batch.page_table import PageTable
from stage4_batch.scheduler import pick_running
from tests.conftest import copy_with_eos, reference
from tests.test_conformance import reasons, run, step, tokens

CPU = torch.device("cpu")
UNLIMITED = 10_000
BUDGETS = (1, 7, 64, UNLIMITED)
MAX_LEN = 80
JOBS = {70: 5, 1: 14, 33: 1, 8: 12, 7: 7, 2: 16, 15: 9, 64: 2}  # prompt length -> tokens asked for


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture
def build(llama):
    """build(budget, max_running) -> Engine, whose runner keeps a record of its steps."""

    def build(budget: int = UNLIMITED, max_running: int = 8, max_model_len: int = MAX_LEN, **changes):
        config = llama.config(max_batch_tokens=budget, max_running=max_running, max_model_len=max_model_len, **changes)
        engine = build_engine(config)
        engine.runner = TracedRunner(engine.runner)
        return engine

    return build


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def steps_of(engine) -> list[list]:
    """What each step has computed, as rows of the trace."""
    return [list(rows) for _, rows in groupby(engine.runner.rows, lambda row: row.step)]


def run_at_random(engine, checkpoint, seed: int, rounds: int = 1) -> dict[int, tuple]:
    """Add the jobs in random order while the engine runs; uid -> (prompt, n, outputs). Every step computes some."""
    draw, served = random.Random(seed), {}
    todo = draw.sample([*JOBS] * rounds, len(JOBS) * rounds)
    while todo or engine.has_work():
        while todo and draw.random() < 0.4:
            prompt, n = checkpoint.prompt(length := todo.pop()), JOBS[length]
            served[engine.add(prompt, greedy(n))] = (prompt, n, [])
        before, had_work = engine.stats().computed_tokens, engine.has_work()
        for output in step(engine):
            served[output.uid][2].append(output)
        assert (engine.stats().computed_tokens > before) == had_work
    return served


# --- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_does_not_depend_on_budget_regions_and_order(build, llama, budget, max_running, seed):
    for prompt, n, outputs in run_at_random(build(budget, max_running), llama, seed).values():
        assert tokens(outputs) == reference(llama, prompt, n)
        assert reasons(outputs) == [None] * (n - 1) + ["max_tokens"]


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_is_read_before_it_is_written(build, llama, budget):
    """Large values in the whole pool, before the first and between two runs, leave no trace in the text."""
    engine = build(budget, max_running=3)
    pool = engine.runner.runner.attention.pool
    for jobs in ([*JOBS.items()], [*JOBS.items()][::-1]):
        for layer in (*pool.k, *pool.v):
            layer.fill_(1e3)
        reqs = engine.generate([llama.prompt(length) for length, _ in jobs], [greedy(n) for _, n in jobs])
        assert [req.output_ids for req in reqs] == [reference(llama, llama.prompt(length), n) for length, n in jobs]


@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_prompts_at_once(build, llama, budget):
    prompt = llama.prompt(20)
    params = [greedy(8), SamplingParams(temperature=1.0, seed=1, max_tokens=8)]
    one, three, two, four = (req.output_ids for req in build(budget).generate([prompt] * 4, params * 2))
    assert one == two == reference(llama, prompt, 8)
    assert three == four != one


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_shortest_answers(build, llama, tmp_path, budget):
    """One token asked for, the eos at once, a prompt that fills max_model_len: one token each, and the region is free."""
    prompt, other = llama.prompt(9), llama.prompt(30)
    eos = reference(llama, prompt, 1)[0]
    text = reference(llama, other, 40)
    text = text[: text.index(eos) + 1] if eos in text else text
    engine = build(budget, max_running=2, model=str(copy_with_eos(llama, tmp_path / "eos", eos)))
    full = llama.prompt(MAX_LEN)
    reqs = engine.generate([prompt, other, full, other], [greedy(24), greedy(40), greedy(24), greedy(1)])
    assert [req.output_ids for req in reqs] == [[eos], text, reference(llama, full, 1), text[:1]]
    assert [req.finish_reason for req in reqs][::2] == ["eos", "length"]
    assert engine.stats().usage == 0


# --- what computes when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 5, 16, 40, UNLIMITED])
def test_a_long_prompt_never_holds_up_a_decode(build, llama, budget):
    engine = build(budget)
    streams = [engine.add(llama.prompt(2, i), greedy(78)) for i in range(3)]
    while engine.stats().running < 3 or engine.stats().waiting:
        step(engine)
    step(engine)
    newcomer, steps = engine.add(llama.prompt(70), greedy(2)), 0
    answered = []
    while newcomer not in answered:
        answered = [output.uid for output in step(engine)]
        steps += 1
        assert set(streams) <= set(answered)
    assert steps == -(-70 // (budget - 3))  # what the decodes leave of the budget goes to the prompt


@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("budget", [1, 2, 7, 64, UNLIMITED])
def test_the_order_of_the_steps(build, llama, budget, max_running):
    """Within the budget, first come first served, and at most one prompt half done."""
    engine = build(budget, max_running)
    run_at_random(engine, llama, seed=2, rounds=2)
    started, answered = [], []
    for rows in steps_of(engine):
        assert sum(row.extend_len for row in rows) <= max(budget, sum(row.extend_len == 1 for row in rows))
        assert len(rows) <= max_running
        started += sorted(row.uid for row in rows if row.cached_len == 0)
        answered += sorted({row.uid for row in rows if row.samples} - set(answered))
        assert len(set(started) - set(answered)) <= 1
    assert started == answered == [*range(2 * len(JOBS))]


def test_no_running_request_waits_even_when_there_are_more_of_them_than_the_budget(build, llama):
    """A budget that is lowered under way holds newcomers back, and no other request."""
    engine = build(budget=64)
    uids = [engine.add(llama.prompt(3, i), greedy(20)) for i in range(5)]
    step(engine)
    engine.scheduler.budget = 2
    late = engine.add(llama.prompt(4), greedy(3))
    for _ in range(18):
        assert {output.uid for output in step(engine)} == set(uids)
    assert tokens(run(engine)[late]) == reference(llama, llama.prompt(4), 3)


def make_req(uid: int, length: int, cached_len: int = 0) -> Req:
    req = Req(uid, [0] * length, greedy(1000), 0, 1000, frozenset())
    req.cached_len = cached_len
    return req


@pytest.mark.parametrize(
    ("budget", "picks"),
    [
        (0, [(3, 1), (1, 1), (4, 1)]),
        (3, [(3, 1), (1, 1), (4, 1)]),
        (7, [(3, 1), (1, 1), (4, 1), (0, 4)]),
        (25, [(3, 1), (1, 1), (4, 1), (0, 20), (2, 2)]),
        (99, [(3, 1), (1, 1), (4, 1), (0, 20), (2, 6)]),
    ],
)
def test_decodes_come_first_the_longest_at_the_head(budget, picks):
    """Then prompts under way, the oldest first, with what the budget leaves. The queue itself stays in its order."""
    running = [make_req(0, 20), make_req(1, 5, 4), make_req(2, 9, 3), make_req(3, 8, 7), make_req(4, 1)]
    done = make_req(5, 3, 2)
    done.device_len = done.max_device_len  # its last token is under way
    running.append(done)
    assert [(req.uid, n) for req, n in pick_running(running, budget)] == picks
    assert [req.uid for req in running] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("budget", "max_running"), [(3, 2), (8, 2), (16, 4), (64, 8), (UNLIMITED, 3)])
def test_an_endless_stream_of_short_prompts_does_not_starve_a_long_one(build, llama, budget, max_running):
    """The bound: the requests ahead compute all they have to at full budget, or are done in turns of max_running answers."""
    short, answer, long, ahead = 5, 6, 70, 12
    engine = build(budget, max_running)
    for i in range(ahead):
        engine.add(llama.prompt(short, i), greedy(answer))
    newcomer = engine.add(llama.prompt(long), greedy(4))
    admitted = -(-ahead * (short + answer - 1) // budget) + -(-ahead // max_running) * answer + 1
    answered = admitted + -(-long // (budget - max_running + 1))
    seen = []
    for i in range(answered + 3):
        engine.add(llama.prompt(short, ahead + i), greedy(answer))  # two newcomers a step: the queue never ends
        engine.add(llama.prompt(short, ahead + i), greedy(answer))
        seen += [(i, output) for output in step(engine) if output.uid == newcomer]
    assert next(row.step for row in engine.runner.rows if row.uid == newcomer) < admitted
    assert seen[0][0] < answered
    assert [i - seen[0][0] for i, _ in seen] == [0, 1, 2, 3]
    assert tokens(output for _, output in seen) == reference(llama, llama.prompt(long), 4)


# --- fixed regions ----------------------------------------------------------------------------------------------


def test_a_region_is_taken_in_the_step_after_it_was_given_back(build, llama):
    engine = build(max_running=2)
    engine.generate([llama.prompt(4, i) for i in range(5)], [greedy(n) for n in (3, 4, 5, 6, 7)])
    steps = {}
    for row in engine.runner.rows:
        steps.setdefault(row.uid, []).append(row.step)
    assert [(s[0], s[-1]) for s in steps.values()] == [(0, 2), (0, 3), (3, 7), (4, 9), (8, 14)]


def test_a_region_is_used_again_over_stale_slots(build, llama):
    engine = build(max_running=1)
    for length, n in [(MAX_LEN, 1), (2, 40), (70, 3), (1, 20), (30, 30)]:
        (req,) = engine.generate([llama.prompt(length)], greedy(n))
        assert req.output_ids == reference(llama, llama.prompt(length), n)


def test_an_admitted_request_starts_from_zero():
    cache, req = FixedCacheManager(1, 8, CPU), Req(0, [1, 2, 3], greedy(5), 0, 8, frozenset())
    for _ in range(2):
        assert cache.admit(req)
        assert (req.cached_len, req.extend_len) == (0, 3)
        picks = [(req, 3)]
        cache.commit(Batch.build(picks, cache.allocate(picks)))
        assert req.cached_len == 3
        cache.release(req)


def test_each_request_has_a_region_of_its_own():
    cache, reqs = FixedCacheManager(3, 8, CPU), [make_req(uid, 8) for uid in range(4)]
    assert [cache.admit(req) for req in reqs] == [True, True, True, False]
    table_idx = cache.allocate([(req, 8) for req in reqs[:3]])
    slots = cache.page_table.slots(table_idx.repeat(8), np.tile(np.arange(8), 3))
    assert sorted(slots.tolist()) == [*range(3 * 8)]  # all of the pool, and no slot twice
    for request in slots.reshape(3, 8):
        assert request.tolist() == [*range(request[0], request[0] + 8)]
    cache.release(reqs[1])
    assert cache.admit(reqs[3])
    assert cache.allocate([(reqs[3], 8)]).tolist() == [table_idx[1]]


@pytest.mark.parametrize("spoil", [
    lambda cache: cache.free.pop(),  # lost
    lambda cache: cache.free.append(cache.free[0]),  # free twice
    lambda cache: cache.free.append(cache.table_idx[0]),  # free and owned
])  # fmt: skip
def test_the_integrity_check_sees_a_region_that_is_lost_or_owned_twice(build, llama, spoil):
    engine = build(max_running=3)
    engine.add(llama.prompt(4), greedy(5))
    step(engine)
    spoil(engine.cache)
    with pytest.raises(AssertionError, match="region"):
        engine.cache.check_integrity()


@pytest.mark.parametrize(("page_size", "pages"), [(1, 5), (3, 4), (8, 1)])
def test_a_page_table_maps_positions_to_slots(page_size, pages):
    """By the entries that were written, of whatever requests and columns, on the host as on the device."""
    table = PageTable(4, pages, page_size, CPU)
    numbers = np.random.default_rng(0).permutation(4 * pages).astype(np.int32).reshape(4, pages)
    for requests in ([2, 0, 1], [3]):  # several at once, and one alone
        table_idx, columns = (x.flatten() for x in np.meshgrid(requests, range(pages)))
        table.write(table_idx, columns, numbers[table_idx, columns])
    assert np.array_equal(table.host, numbers)
    assert np.array_equal(table.device.numpy(), numbers)
    for request in range(4):
        for position in range(pages * page_size):
            (slot,) = table.slots(np.array([request]), np.array([position]))
            assert slot == numbers[request, position // page_size] * page_size + position % page_size


# --- abort ------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(build, llama):
    """An engine of 3 regions and 8 tokens per step, in which 0 and 1 decode, 2 is half-prefilled, and 3 and 4 wait."""
    engine, outputs = build(budget=8, max_running=3), {}
    for length, n in [(3, 12), (4, 12), (40, 4), (5, 4), (6, 4)]:
        engine.add(llama.prompt(length), greedy(n))
    for _ in range(4):
        for output in step(engine):
            outputs.setdefault(output.uid, []).append(output)
    assert set(outputs) == {0, 1}
    assert (engine.stats().running, engine.stats().waiting) == (3, 2)
    expected = [reference(llama, llama.prompt(length), n) for length, n in [(3, 12), (4, 12), (40, 4), (5, 4), (6, 4)]]
    return engine, outputs, expected


@pytest.mark.parametrize("victims", [[0], [1], [2], [3], [4], [2, 3], [0, 1, 2], [4, 3, 2, 1], [0, 1, 2, 3, 4]])
def test_abort_in_any_state_leaves_the_others_as_they_were(crowd, victims):
    engine, outputs, expected = crowd
    for uid in victims:
        assert engine.abort(uid)
        assert not engine.abort(uid)
        engine.cache.check_integrity()
    for uid, more in run(engine).items():
        assert uid not in victims
        outputs.setdefault(uid, []).extend(more)
    for uid in {0, 1, 2, 3, 4} - set(victims):
        assert tokens(outputs[uid]) == expected[uid]
    assert engine.stats().usage == 0


def test_abort_while_the_step_is_under_way(build, llama):
    """Between launch and collect: the token is dropped, even if it would have been the last, and the region is free."""
    engine = build()
    prompts = [llama.prompt(n) for n in (5, 6, 7)]
    last, going, other = (engine.add(prompt, greedy(n)) for prompt, n in zip(prompts, (2, 9, 4), strict=True))
    outputs = step(engine)
    batch = engine.scheduler.schedule()
    samples = engine.launch(batch)
    assert engine.abort(last)
    assert engine.abort(going)
    engine.cache.check_integrity()
    more = engine.collect(batch, samples)
    assert [output.uid for output in more] == [other]
    outputs = [output for output in outputs + more if output.uid == other] + run(engine)[other]
    assert tokens(outputs) == reference(llama, prompts[2], 4)
    assert not engine.abort(last)
    assert engine.stats().usage == 0


def test_abort_after_the_end_is_false(build, llama):
    engine = build()
    uid, other = engine.add(llama.prompt(5), greedy(1)), engine.add(llama.prompt(5), greedy(2))
    assert {output.uid: output.finish_reason for output in step(engine)} == {uid: "max_tokens", other: None}
    assert not engine.abort(uid)
    assert engine.abort(other)
    assert not engine.has_work()


# --- numbers ----------------------------------------------------------------------------------------------------


def numbers(engine) -> tuple:
    stats = engine.stats()
    return stats.running, stats.waiting, stats.usage, stats.steps, stats.computed_tokens, stats.output_tokens


def test_stats_of_a_small_scenario(build, llama):
    engine = build(budget=8, max_running=4)
    assert numbers(engine) == (0, 0, 0, 0, 0, 0)
    for length, n in [(3, 3), (12, 2), (2, 1)]:
        engine.add(llama.prompt(length), greedy(n))
    assert numbers(engine) == (0, 3, 0, 0, 0, 0)
    seen = []
    for _ in range(3):
        step(engine)
        seen.append(numbers(engine))
    assert seen == [
        (2, 1, 0.5, 1, 8, 1),  # all of the first prompt and 5 tokens of the second
        (2, 1, 0.5, 2, 16, 3),  # a decode, and the other 7
        (0, 0, 0, 3, 20, 6),  # two decodes and the third prompt; all of them end
    ]
    assert step(engine) == []
    assert numbers(engine) == seen[-1]


def test_the_progress_bar_counts_requests_and_changes_nothing(build, llama, capsys):
    prompts = [llama.prompt(n) for n in (3, 30, 8)]
    silent = build().generate(prompts, greedy(6))
    assert capsys.readouterr().err == ""
    loud = build().generate(prompts, greedy(6), progress=True)
    assert "3/3" in capsys.readouterr().err
    assert [req.output_ids for req in loud] == [req.output_ids for req in silent]


# --- the decode kernel over fixed regions -----------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lens", [[5], [1, 9, 4], [16, 16], [7, 7, 7, 7, 7]])
def test_the_decode_kernel_finds_each_request_in_its_region(heads, lens):
    """Against the attention of the prompt kernel over the same keys; other regions and later slots hold large values."""
    generator, (heads_q, heads_kv), dim, regions = torch.Generator().manual_seed(len(lens)), heads, 8, 6
    q = torch.randn(len(lens), 1, heads_q, dim, generator=generator)
    k, v = torch.full((2, regions, 16, heads_kv, dim), 1e3)
    where = random.Random(len(lens)).sample(range(regions), len(lens))
    stored = [torch.randn(2, n, heads_kv, dim, generator=generator) for n in lens]
    for region, n, (new_k, new_v) in zip(where, lens, stored, strict=True):
        k[region, :n], v[region, :n] = new_k, new_v
    seqlens, region_ids = torch.tensor(lens, dtype=torch.int32), torch.tensor(where, dtype=torch.int32)
    out = portable.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, cache_batch_idx=region_ids, causal=True)
    bounds_q, bounds_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0) for n in ([1] * len(lens), lens))
    keys, values = (torch.cat([pair[i] for pair in stored]) for i in (0, 1))
    expected = portable.flash_attn_varlen_func(q[:, 0], keys, values, bounds_q, bounds_k, 1, max(lens), causal=True)
    torch.testing.assert_close(out[:, 0], expected, atol=1e-5, rtol=1e-5)
    table = region_ids[:, None]  # as the engine has it: a region is a page
    out = portable.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, block_table=table, causal=True)
    torch.testing.assert_close(out[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_a_kernel_that_reads_blocks_says_what_size_it_wants(build):
    """flash-attn reads blocks of 256 tokens: a region of 80 is refused before anything is computed, one of 512 is served."""
    attention = build().runner.runner.attention
    kernels = replace(attention.kernels, block_multiple=256)
    with pytest.raises(UserError, match="blocks of 256 tokens, not 80"):
        PagedAttention(kernels, attention.pool, attention.page_table)
    regions = PageTable(max_running=1, max_pages=1, page_size=512, device=CPU)
    assert PagedAttention(kernels, attention.pool, regions).page_table.page_size == 512
