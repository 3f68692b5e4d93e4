"""Stage 2: parameters are checked, draws follow their distribution, penalties are the published formulas, noise is a
function of (seed, position) alone, and the engine refuses what it cannot serve without changing its state.
"""

import math
from collections import Counter
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

from common.config import UserError
from common.kernels import ops
from stage2_req.build import build_engine
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage2_req.sampling import GumbelSampler, adjusted, keep_likeliest, noise_keys
from stage2_req.trace import TracedRunner
from tests.conftest import copy_with_eos, reference

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5])


def make_req(params, prompt=(0,), output=(), seed=0, uid=0) -> Req:
    req = Req(uid, list(prompt), params, seed, 10_000, frozenset())
    req.token_ids += output
    req.device_len = len(req.token_ids)
    return req


def sample(logits, params, *, seeds=(0,), prompt=(0,), output=()) -> list[int]:
    """One draw a seed from the same logits, all in one call of the sampler."""
    reqs = [make_req(params, prompt, output, seed) for seed in seeds]
    return GumbelSampler()(torch.as_tensor(logits).expand(len(reqs), -1), reqs).tokens.tolist()


def frequencies(logits, **params) -> np.ndarray:
    tokens = sample(logits, SamplingParams(**{"temperature": 1.0} | params), seeds=range(DRAWS))
    return np.bincount(tokens, minlength=len(logits)) / DRAWS


def softmax(logits, temperature=1.0) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    e = np.exp((logits - logits.max()) / temperature)
    return e / e.sum()


def assert_close(seen, expected) -> None:
    """Within 4.5 standard deviations everywhere, and exactly 0 where nothing may be drawn."""
    sigma = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(seen - expected) <= 4.5 * sigma).all(), (seen, expected)


# --- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "values"), {
    "temperature": [-0.1, 1e7, 10**400, math.nan, math.inf, "1", None],
    "top_k": [-2, 2**31, math.nan],
    "top_p": [-0.5, 1.5, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "max_tokens": [0, -1, 2**31, math.nan, math.inf, None],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "min_tokens": [-1, 17, None],  # max_tokens is 16
    "logit_bias": [{5: 101}, {5: -101}, {5: math.nan}],
}.items())  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(UserError, match=field):
            SamplingParams(**{field: value})


def test_numbers_of_numpy_become_pythons():
    """Others can't be sent to other processes, or overflow where a seed is hashed."""
    given = SamplingParams(
        np.float32(0.5), np.int32(4), seed=np.int64(-5), max_tokens=np.int64(3), logprobs=np.uint8(2),
        logit_bias={np.int64(3): np.float32(1)}, stop_token_ids=[np.int64(4)],
    )  # fmt: skip
    plain = SamplingParams(0.5, 4, seed=-5, max_tokens=3, logprobs=2, logit_bias={3: 1.0}, stop_token_ids=[4])
    assert repr(given) == repr(plain)


@pytest.mark.parametrize("params", [
    {"temperature": 0}, {"temperature": 5.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"top_p": 1}, {"top_p": 0},
    {"top_p": 1e-9}, {"min_p": 0}, {"min_p": 1}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"max_tokens": 1},
    {"min_tokens": 16}, {"logprobs": 0}, {"logprobs": 20}, {"logit_bias": {0: 100, 1: -100}}, {"seed": -1}, {"seed": 2**64},
    {"stop_token_ids": [1, 2]},
])  # fmt: skip
def test_a_value_at_the_edge_is_taken_and_works(params):
    (token,) = sample(LOGITS, SamplingParams(**{"temperature": 1.0} | params), seeds=[params.get("seed", 0)])
    assert 0 <= token < len(LOGITS)


# --- distributions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
def test_temperature(temperature):
    assert_close(frequencies(LOGITS, temperature=temperature), softmax(LOGITS, temperature))


def filtered(keep, temperature=1.0) -> np.ndarray:
    """The softmax over the tokens in `keep` alone."""
    probs = softmax(LOGITS, temperature)
    probs[[i for i in range(len(probs)) if i not in keep]] = 0
    return probs / probs.sum()


# Of LOGITS, likeliest first: tokens 0 (.410), 5 (.249), 1 (.151), 2 (.092), 3 (.056), 4 (.020); rounded down.
@pytest.mark.parametrize(("params", "keep"), [
    ({"top_k": 2}, {0, 5}),
    ({"top_k": 4}, {0, 5, 1, 2}),
    ({"top_k": -1}, {0, 5, 1, 2, 3, 4}),
    ({"top_k": 99}, {0, 5, 1, 2, 3, 4}),
    ({"top_p": 0.5}, {0, 5}),  # .410 is too little, .660 is enough
    ({"top_p": 0.7}, {0, 5, 1}),
    ({"top_p": 0.95}, {0, 5, 1, 2, 3}),
    ({"min_p": 0.3}, {0, 5, 1}),  # .410 * .3 = .123
    ({"min_p": 1.0}, {0}),
    ({"temperature": 2.0, "top_p": 0.5}, {0, 5}),  # filters see the distribution after the temperature
    ({"temperature": 0.5, "top_p": 0.6}, {0}),
    ({"top_k": 3, "top_p": 0.8}, {0, 5}),  # of the three, 0 and 5 hold .814; of all, they hold .660
    ({"top_k": 4, "min_p": 0.5}, {0, 5}),
    ({"top_p": 0.85, "min_p": 0.3}, {0, 5, 1}),
    ({"top_k": 5, "top_p": 0.99, "min_p": 0.2}, {0, 5, 1, 2}),
])  # fmt: skip
def test_filters(params, keep):
    seen, expected = frequencies(LOGITS, **params), filtered(keep, params.get("temperature", 1.0))
    assert_close(seen, expected)
    assert set(np.flatnonzero(seen)) == keep


def test_each_row_of_a_batch_has_its_own_filters():
    params = [
        SamplingParams(temperature=1.0, **p) for p in ({}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 1.0})
    ]
    params.append(SamplingParams())
    reqs = [make_req(params[i % len(params)], seed=i) for i in range(6000)]
    tokens = GumbelSampler()(LOGITS.expand(len(reqs), -1), reqs).tokens.tolist()
    assert [set(tokens[i :: len(params)]) for i in range(len(params))] == [
        {0, 1, 2, 3, 4, 5},
        {0},
        {0, 5},
        {0, 5, 1},
        {0},
        {0},
    ]


def test_top_p_keeps_the_token_that_reaches_it_exactly_and_no_more():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log2() * math.log(2)
    assert set(sample(logits, SamplingParams(temperature=1, top_p=0.5), seeds=range(500))) == {0}
    assert set(sample(logits, SamplingParams(temperature=1, top_p=0.75), seeds=range(500))) == {0, 1}
    assert set(sample(logits, SamplingParams(temperature=1, top_p=0.76), seeds=range(500))) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-300])
def test_a_tiny_top_p_keeps_exactly_the_likeliest(top_p):
    assert set(sample(LOGITS, SamplingParams(temperature=1, top_p=top_p), seeds=range(500))) == {0}
    assert set(sample(torch.zeros(6), SamplingParams(temperature=1, top_p=top_p), seeds=range(500))) == {0}


def test_top_p_1_rules_no_token_out():
    """Not even one that is too unlikely to move a float32 sum, when another filter makes the row be filtered."""
    scores = torch.tensor([[0.0, -5.0, -18.0, -20.0, -40.0]])
    kept = keep_likeliest(scores, [SamplingParams(temperature=1, top_k=5, top_p=1.0)])
    assert torch.equal(kept, scores)


def test_equal_logits():
    logits = torch.zeros(8)
    assert sample(logits, SamplingParams()) == [0]  # greedy: the lowest id
    assert sample(logits, SamplingParams(logprobs=1)) == [0]  # on the full path too
    assert sample(logits, SamplingParams(temperature=1, top_k=1)) == [0]
    assert_close(frequencies(logits), np.full(8, 1 / 8))
    assert_close(frequencies(logits, min_p=1.0), np.full(8, 1 / 8))
    assert_close(frequencies(logits, top_k=4), np.repeat([1 / 4, 0], 4))


def test_minus_infinity_is_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    for params in (
        {},
        {"top_k": 3},
        {"top_p": 1.0, "top_k": 4},
        {"min_p": 0.01},
        {"temperature": 50.0},
        {"top_p": 0.999},
    ):
        seen = frequencies(logits, **params)
        assert_close(seen, np.array([0.5, 0, 0.5, 0]))
        assert seen[1] == seen[3] == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_the_argmax(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    assert set(sample(LOGITS, params, seeds=range(200))) == {0}
    assert set(sample(20 * LOGITS.flip(0), params, seeds=range(200))) == {5}
    assert set(sample(LOGITS - 100, params, seeds=range(200))) == {0}


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
@pytest.mark.parametrize("temperature", [1e-10, 1.0, 100.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_huge_logits_do_not_overflow(size, temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    assert set(sample(torch.tensor([-size, size / 2, size, 0.0]), params, seeds=range(100))) == {2}
    equal = set(sample(torch.tensor([size, -size, size]), params, seeds=range(100)))
    assert equal == {0, 2} if size / temperature < 1e6 else equal <= {0, 2}  # beyond, noise is lost in rounding


# --- penalties, bias, logprobs ----------------------------------------------------------------------------------


def scores(params, logits, prompt, output) -> list[float]:
    return adjusted(torch.tensor([logits]), [make_req(params, prompt, output)])[0].tolist()


def test_repetition_penalty_counts_prompt_and_output_once():
    result = scores(
        SamplingParams(repetition_penalty=2.0), [4.0, -3.0, 1.0, -1.0, 0.0], prompt=[0, 0, 1], output=[2, 2]
    )
    assert result == [2.0, -6.0, 0.5, -1.0, 0.0]


def test_presence_and_frequency_penalty_count_the_output_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert scores(params, [1.0, 1.0, 1.0, 1.0], prompt=[0, 0, 1], output=[1, 2, 2, 2]) == [1.0, 0.25, -0.25, 1.0]
    assert scores(SamplingParams(presence_penalty=-1.0), [0.0, 0.0], prompt=[0], output=[1, 1]) == [0.0, 1.0]
    assert scores(SamplingParams(frequency_penalty=-1.0), [0.0, 0.0], prompt=[0], output=[1, 1]) == [0.0, 2.0]


def test_logit_bias_is_added_and_combines_with_the_penalties():
    assert scores(SamplingParams(logit_bias={1: 2.5, 2: -100}), [1.0, 1.0, 1.0], [0], []) == [1.0, 3.5, -99.0]
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 3.0, 2: 1.0}
    )
    assert scores(params, [4.0, 4.0, 4.0], prompt=[0], output=[1, 1]) == [2.0, 4 / 2 - 0.5 - 2 * 0.25 + 3.0, 5.0]


def test_penalties_change_the_choice_of_their_own_row_only():
    logits = torch.tensor([[1.0, 0.9, 0.0]] * 3)
    reqs = [
        make_req(SamplingParams(repetition_penalty=2.0), prompt=[0]),
        make_req(SamplingParams(), prompt=[0]),
        make_req(SamplingParams(logit_bias={2: 5.0}), prompt=[0]),
    ]
    before = logits.clone()
    assert GumbelSampler()(logits, reqs).tokens.tolist() == [1, 0, 2]
    assert torch.equal(logits, before)


def test_a_bias_shifts_the_distribution():
    assert_close(frequencies(LOGITS, logit_bias={4: 3.0}), softmax([2.0, 1.0, 0.5, 0.0, 2.0, 1.5]))


def test_logprobs_are_of_the_model_not_of_the_adjusted_scores():
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias={3: 50.0}, logprobs=3)
    tokens, entries, _ = GumbelSampler()(LOGITS[None], [make_req(params)]).to_host()
    expected = np.log(softmax(LOGITS))
    assert tokens == [3]
    assert entries[0].chosen == pytest.approx(expected[3], abs=1e-5)
    assert [token for token, _ in entries[0].top] == [0, 5, 1]
    assert [value for _, value in entries[0].top] == pytest.approx(expected[[0, 5, 1]], abs=1e-5)


def test_more_logprobs_than_tokens_gives_all_tokens():
    _, entries, _ = GumbelSampler()(LOGITS[None], [make_req(SamplingParams(logprobs=20))]).to_host()
    assert sorted(token for token, _ in entries[0].top) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_greedy_fast_path_equals_the_full_path(dtype):
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    reqs = [make_req(SamplingParams()) for _ in range(64)]
    fast = GumbelSampler()(logits, reqs).tokens.tolist()
    assert fast == logits.float().numpy().argmax(-1).tolist()
    for params in (SamplingParams(logprobs=1), SamplingParams(temperature=1.0), SamplingParams(logit_bias={0: -1.0})):
        assert GumbelSampler()(logits, [*reqs[:-1], make_req(params)]).tokens.tolist()[:-1] == fast[:-1]


# --- noise ------------------------------------------------------------------------------------------------------


def noise(seeds, positions, size: int) -> torch.Tensor:
    """The noise [S, size] that requests with these seeds add to the logits of their tokens at these positions."""
    reqs = [make_req(SamplingParams(), seed=seed) for seed in seeds]
    for req, position in zip(reqs, positions, strict=True):
        req.device_len = position
    return ops.gumbel(size, *torch.from_numpy(noise_keys(reqs)))


def test_noise_is_a_function_of_seed_and_position_alone():
    seeds, positions = [0, 1, 2, -1, 2**63, 12345, 2**64 - 2], [5, 5, 6, 7, 1000, 0, 1]
    together = noise(seeds, positions, 50)
    for row, seed, position in zip(together, seeds, positions, strict=True):
        assert torch.equal(row, noise([seed], [position], 50)[0])
    assert torch.equal(noise(seeds[::-1], positions[::-1], 50), together.flip(0))


def test_noise_of_other_seeds_and_positions_is_other_noise():
    grid = [(seed, position) for seed in range(60) for position in range(60)]
    rows = noise([s for s, _ in grid], [p for _, p in grid], 16)
    assert len(set(map(tuple, rows.tolist()))) == len(grid)
    flat = rows[:, :8].reshape(60, 60, 8).double()
    for a, b in ((flat[1:], flat[:-1]), (flat[:, 1:], flat[:, :-1]), (flat[..., 1:], flat[..., :-1])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.03  # neighbours have nothing in common


def test_noise_is_standard_gumbel():
    drawn = noise(range(200), [3] * 200, 5000).double()
    assert drawn.isfinite().all()
    assert drawn.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert drawn.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-1.5, 0.0, 2.0, 5.0, 9.0):  # P(G > x) = 1 - exp(-exp(-x))
        expected = -math.expm1(-math.exp(-x))
        tolerance = 4.5 * math.sqrt(expected * (1 - expected) / drawn.numel())
        assert (drawn > x).double().mean().item() == pytest.approx(expected, abs=tolerance)


def test_a_sampled_token_does_not_depend_on_the_batch():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.8},
        {},
        {"temperature": 2.0, "presence_penalty": 1.0, "top_k": 9},
    ]
    reqs = [make_req(SamplingParams(**kinds[i % 4]), prompt=range(i + 1), output=[i], seed=i) for i in range(40)]
    together = GumbelSampler()(logits, reqs).tokens.tolist()
    assert together == [GumbelSampler()(logits[i : i + 1], [req]).tokens.item() for i, req in enumerate(reqs)]


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed_batch():
    """Two prompts and two decodes, in the wrong order; their uids are their lengths."""
    reqs = [make_req(SamplingParams(), prompt=range(n), uid=n) for n in (6, 4, 1, 9)]
    reqs[1].cached_len = 3
    reqs[3].cached_len = 2
    return Batch.build([(reqs[0], 6), (reqs[2], 1), (reqs[1], 1), (reqs[3], 4)], [50, 51, 52, 53])


def test_a_batch_puts_decodes_first_and_knows_what_is_sampled(mixed_batch):
    assert [req.uid for req in mixed_batch.reqs] == [1, 4, 6, 9]
    assert mixed_batch.table_idx.tolist() == [51, 52, 50, 53]
    assert mixed_batch.num_decodes == 2
    assert mixed_batch.num_tokens == 12
    assert mixed_batch.prefix_lens.tolist() == [0, 3, 0, 2]
    assert mixed_batch.extend_lens.tolist() == [1, 1, 6, 4]
    assert mixed_batch.seq_lens.tolist() == [1, 4, 6, 6]
    assert mixed_batch.input_ids().tolist() == [0, 3, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert mixed_batch.positions().tolist() == [0, 3, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert mixed_batch.sample_mask.tolist() == [True, True, True, False]
    assert [req.uid for req in mixed_batch.sampled] == [1, 4, 6]  # of 9's positions, three are still to come
    assert mixed_batch.last_indices().tolist() == [0, 1, 7]


def test_a_batch_does_not_follow_its_requests(mixed_batch):
    """The host reads a step's tokens when the requests' lengths have moved on."""
    for req in mixed_batch.reqs:
        req.cached_len, req.device_len = req.device_len, req.device_len + 1
    assert mixed_batch.positions().tolist() == [0, 3, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert mixed_batch.last_indices().tolist() == [0, 1, 7]


def test_a_batch_is_frozen(mixed_batch):
    for field in fields(Batch):
        with pytest.raises(FrozenInstanceError):
            setattr(mixed_batch, field.name, None)
    with pytest.raises(FrozenInstanceError):
        mixed_batch.input = None  # and nothing can be added


def test_there_is_no_batch_without_requests():
    assert Batch.build([], []) is None


# --- the engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture
def engine(llama):
    return build_engine(llama.config(max_model_len=64))


BAD_REQUESTS = {
    "prompt is empty": ([], SamplingParams()),
    "65 tokens": ([1] * 65, SamplingParams()),
    "outside 0 to 95": ([1, 96], SamplingParams()),
    "ids outside": ([-1], SamplingParams()),
    "logit_bias names token 96": ([1], SamplingParams(logit_bias={96: 1.0})),
    "logit_bias names token -1": ([1], SamplingParams(logit_bias={-1: 1.0})),
    "stop_token_ids names token 99": ([1], SamplingParams(stop_token_ids=[99])),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_add_refuses_a_bad_request_and_changes_nothing(engine, message):
    first = engine.add([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(UserError, match=message):
        engine.add(*BAD_REQUESTS[message])
    assert engine.stats().waiting == 1
    assert engine.add([1], SamplingParams(max_tokens=1)) == first + 1
    assert Counter(output.uid for _ in range(3) for output in engine.step()) == {first: 2, first + 1: 1}
    assert not engine.has_work()


def test_the_caller_may_choose_the_uid(engine, llama):
    """And then the engine's own numbers go on after the largest."""
    params, lengths = SamplingParams(max_tokens=3), {7: 3, 2: 5, 8: 4, 9: 1}
    assert engine.add(llama.prompt(3), params, 7) == 7
    assert engine.add(llama.prompt(5), params, uid=2) == 2
    assert engine.add(llama.prompt(4), params) == 8
    assert engine.add(llama.prompt(1), params) == 9
    texts = {uid: [] for uid in lengths}
    while engine.has_work():
        for output in engine.step():
            texts[output.uid].append(output.token_id)
    assert texts == {uid: reference(llama, llama.prompt(n), 3) for uid, n in lengths.items()}
    (req,) = engine.generate([llama.prompt(4)], params)
    assert req.uid == 10


def test_the_noise_of_a_request_without_a_seed_is_that_of_its_uid(engine, llama):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    first, other = (req.output_ids for req in engine.generate([llama.prompt(4)] * 2, params))
    assert first != other
    assert engine.add(llama.prompt(4), params, uid=1) == 1
    assert [output.token_id for _ in range(12) for output in engine.step()] == other


def test_a_uid_that_is_in_use_is_refused_and_nothing_changes(engine, llama):
    """Whether its request runs or waits. Once that has ended, the uid is free again."""
    runs = engine.add(llama.prompt(3), SamplingParams(max_tokens=4))
    waits = engine.add(llama.prompt(5), SamplingParams(max_tokens=2), 30)
    outputs = engine.step()
    before = engine.stats()
    assert (before.running, before.waiting) == (1, 1)
    for uid in (runs, waits):
        with pytest.raises(UserError, match=f"uid {uid} belongs to a request that has not ended"):
            engine.add(llama.prompt(9), SamplingParams(max_tokens=9), uid)
    assert engine.stats() == before
    while engine.has_work():
        outputs += engine.step()
    for uid, length, n in ((runs, 3, 4), (waits, 5, 2)):
        assert [output.token_id for output in outputs if output.uid == uid] == reference(llama, llama.prompt(length), n)
    assert engine.add(llama.prompt(4), SamplingParams(max_tokens=1), runs) == runs
    assert engine.add(llama.prompt(4), SamplingParams(max_tokens=1)) == 31
    assert Counter(output.uid for _ in range(2) for output in engine.step()) == {runs: 1, 31: 1}


def test_generate_checks_all_before_it_starts_any(engine, llama):
    with pytest.raises(UserError, match="empty"):
        engine.generate([[1], [2], []], SamplingParams())
    assert not engine.has_work()
    assert engine.stats().steps == 0
    with pytest.raises(ValueError):  # as many params as prompts
        engine.generate([[1], [2]], [SamplingParams()])
    assert not engine.has_work()
    (req,) = engine.generate([llama.prompt(4)], SamplingParams(max_tokens=3))
    assert req.output_ids == reference(llama, llama.prompt(4), 3)


def test_generate_of_nothing_is_nothing(engine):
    assert engine.generate([], SamplingParams()) == []


def test_generate_needs_an_idle_engine(engine):
    engine.add([1], SamplingParams(max_tokens=2))
    with pytest.raises(UserError, match="idle"):
        engine.generate([[1]], SamplingParams())
    assert engine.stats().waiting == 1


@pytest.mark.parametrize("interrupted_part", ["runner.forward", "runner.sampler", "scheduler.update"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupted_generate_leaves_nothing_behind(engine, llama, monkeypatch, interrupted_part, after):
    owner, _, name = interrupted_part.partition(".")
    target = getattr(engine, owner)
    original, calls = getattr(target, name), []

    def interrupt(*args):
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([llama.prompt(n) for n in (3, 4, 5)], SamplingParams(max_tokens=4))
    assert not engine.has_work()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().usage) == (0, 0, 0)
    (req,) = engine.generate([llama.prompt(6)], SamplingParams(max_tokens=6))
    assert req.output_ids == reference(llama, llama.prompt(6), 6)


def test_stats_count_what_was_done(engine):
    engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4))
    stats = engine.stats()
    assert (stats.steps, stats.output_tokens, stats.computed_tokens) == (8, 8, (3 + 4 + 5 + 6) + (1 + 2 + 3 + 4))


def test_without_a_cache_every_step_computes_the_whole_sequence(engine):
    engine.runner = trace = TracedRunner(engine.runner)
    reqs = engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3))
    assert [(row.uid, row.cached_len, row.device_len, row.extend_len) for row in trace.rows] == [
        (req.uid, 0, n, n) for req in reqs for n in range(req.prompt_len, req.prompt_len + 3)
    ]
    assert [row.step for row in trace.rows] == list(range(6))
    assert all(row.samples for row in trace.rows)


def test_the_first_token_can_be_the_eos(llama, tmp_path):
    prompt = llama.prompt(9)
    folder = copy_with_eos(llama, tmp_path / "eos", reference(llama, prompt, 24)[0])
    (req,) = build_engine(llama.config(model=str(folder))).generate([prompt], SamplingParams(max_tokens=24))
    assert (len(req.output_ids), req.finish_reason) == (1, "eos")


def test_a_request_knows_its_times(engine):
    (req,) = engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert 0 < req.arrived_at < req.first_token_at < req.finished_at


@pytest.mark.parametrize("name", ["top_k", "seed", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens"])
@pytest.mark.parametrize("value", [1.5, "1", [1], 1j])
def test_numbers_that_must_be_whole(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


def test_a_refused_generate_changes_nothing(tiny_checkpoint):
    checkpoint = tiny_checkpoint("llama")
    engine, params = build_engine(checkpoint.config()), SamplingParams(temperature=1.0, max_tokens=8)
    with pytest.raises(UserError, match="2 prompts and 1 params"):
        engine.generate([[1], [2]], [params])
    with pytest.raises(UserError, match="empty"):
        engine.generate([[1], []], params)
    fresh = build_engine(checkpoint.config())
    assert engine.generate([[1]], params)[0].output_ids == fresh.generate([[1]], params)[0].output_ids
