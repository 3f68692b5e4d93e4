"""Stage 3: after the prompt a step computes one position, keys and values stay where they were put, and nothing that an
earlier request left behind is ever read.
"""

import pytest
import torch

from common.checkpoint import load
from stage2_req import build as stage2
from stage2_req.params import SamplingParams
from stage2_req.trace import TracedRunner
from stage3_kvcache.build import build_engine
from stage3_kvcache.kv_pool import KVCachePool
from tests.conftest import reference


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


def pool_of(engine) -> KVCachePool:
    return engine.runner.attention.pool


def test_a_prompt_at_once_then_one_position_a_step(llama):
    engine = build_engine(llama.config())
    engine.runner = trace = TracedRunner(engine.runner)
    for req in engine.generate([llama.prompt(9), llama.prompt(1)], SamplingParams(max_tokens=5)):
        rows = [
            (row.cached_len, row.device_len, row.extend_len, row.samples) for row in trace.rows if row.uid == req.uid
        ]
        n = req.prompt_len
        assert rows == [(0, n, n, True)] + [(n + i - 1, n + i, 1, True) for i in range(1, 5)]
    stats = engine.stats()
    assert (stats.steps, stats.computed_tokens, stats.output_tokens) == (10, 9 + 4 + 1 + 4, 10)


def test_each_position_has_its_slot_and_no_other_is_touched(llama):
    engine = build_engine(llama.config(max_model_len=64))
    pool = pool_of(engine)
    for half in (pool.k, pool.v):
        for layer in half:
            layer.fill_(1e3)
    engine.generate([llama.prompt(10)], SamplingParams(max_tokens=6))
    for half in (pool.k, pool.v):
        for layer in half:
            assert (layer[15:] == 1e3).all()  # 10 + 6 tokens, of which the last needs no slot
            assert not (layer[:15] == 1e3).any()


def test_keys_and_values_are_those_of_hugging_face(llama):
    engine = build_engine(llama.config())
    (req,) = engine.generate([llama.prompt(10)], SamplingParams(max_tokens=6))
    with torch.inference_mode():
        cache = llama.hf(torch.tensor([req.token_ids[:-1]]), use_cache=True).past_key_values
    for layer in range(2):
        for ours, theirs in (
            (pool_of(engine).k, cache.layers[layer].keys),
            (pool_of(engine).v, cache.layers[layer].values),
        ):
            torch.testing.assert_close(ours[layer][:15], theirs[0].transpose(0, 1), rtol=1e-3, atol=1e-4)


def test_a_longer_request_leaves_nothing_behind(llama):
    engine = build_engine(llama.config())
    engine.generate([llama.prompt(200)], SamplingParams(max_tokens=20))
    for length in (30, 1, 7):
        (req,) = engine.generate([llama.prompt(length)], SamplingParams(max_tokens=20))
        assert req.output_ids == reference(llama, llama.prompt(length), 20)


def test_an_aborted_request_leaves_nothing_behind(llama):
    engine = build_engine(llama.config())
    uid = engine.add(llama.prompt(100), SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    assert engine.abort(uid)
    (req,) = engine.generate([llama.prompt(30)], SamplingParams(max_tokens=20))
    assert req.output_ids == reference(llama, llama.prompt(30), 20)


def test_usage_is_the_share_of_slots_with_a_cached_position(llama):
    engine = build_engine(llama.config(max_model_len=40))
    assert engine.stats().usage == 0
    engine.add(llama.prompt(10), SamplingParams(max_tokens=3))
    for expected in (10 / 40, 11 / 40, 0):
        engine.step()
        assert engine.stats().usage == pytest.approx(expected)
    engine.add(llama.prompt(39), SamplingParams(max_tokens=3))
    engine.step()
    assert engine.stats().usage == pytest.approx(39 / 40)


def test_a_pool_takes_the_memory_that_the_formula_says(llama):
    m = load(llama.config(dtype="bfloat16"))
    pool = KVCachePool(m, 100)
    taken = sum(layer.numel() * layer.element_size() for layer in (*pool.k, *pool.v))
    assert taken == 100 * m.model.config.kv_bytes_per_token(2)


def test_new_keys_and_values_go_to_their_slots(llama):
    m = load(llama.config())
    pool = KVCachePool(m, 8)
    k, v = torch.randn(2, 3, *pool.k[0].shape[1:])
    m.kernels.ops.store_kv(pool.k[1], pool.v[1], torch.tensor([6, 0, 3]), k, v)
    assert torch.equal(pool.k[1][[6, 0, 3]], k)
    assert torch.equal(pool.v[1][[6, 0, 3]], v)
    assert pool.k[1][[1, 2, 4, 5, 7]].abs().sum() == pool.k[0].abs().sum() == 0


def test_bfloat16_logits_are_near(llama):
    """In bfloat16 texts may part at a near tie, so compare what the model thinks of one and the same text."""
    params = SamplingParams(max_tokens=1, logprobs=20)
    prompts = [llama.prompt(n) for n in (1, 40, 200)]
    exact, near = (
        build_engine(llama.config(dtype=dtype)).generate(prompts, params) for dtype in ("float32", "bfloat16")
    )
    for a, b in zip(exact, near, strict=True):
        expected, seen = dict(a.logprobs[0].top), dict(b.logprobs[0].top)
        common = expected.keys() & seen.keys()
        assert len(common) >= 15
        assert max(abs(expected[token] - seen[token]) for token in common) < 0.5


def test_bfloat16_with_a_cache_is_bfloat16_without(llama):
    prompt, params = llama.prompt(40), SamplingParams(max_tokens=8, logprobs=0)
    (cached,) = build_engine(llama.config(dtype="bfloat16")).generate([prompt], params)
    (naive,) = stage2.build_engine(llama.config(dtype="bfloat16")).generate([prompt], params)
    assert len(cached.output_ids) == 8
    assert cached.logprobs[0].chosen == pytest.approx(naive.logprobs[0].chosen, abs=0.05)
