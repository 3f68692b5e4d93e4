"""The lab, chapter 3: a cache for one request."""

from types import SimpleNamespace

import torch

from stage3_kvcache.attention import CachedAttention
from stage3_kvcache.cache import SingleCacheManager
from tests.lab.learner import attention, batch, cpu_kernels, expect, expect_close, request


class Test_3_1:
    """admit and commit"""

    def test_one_request_at_a_time(self):
        cache, a, b = SingleCacheManager(100), request(uid=1), request(uid=2)
        expect("admit(a), then admit(b)", [cache.admit(a), cache.admit(b)], [True, False])
        cache.release(a)
        expect("admit(b) after release(a)", cache.admit(b), True)

    def test_a_request_that_is_let_in_has_nothing_cached(self):
        cache, req = SingleCacheManager(100), request(5)
        req.cached_len = 3  # from an earlier life
        cache.admit(req)
        expect("cached_len after admit", req.cached_len, 0)

    def test_after_a_step_its_positions_are_cached(self):
        cache, req = SingleCacheManager(100), request(5)
        cache.admit(req)
        cache.commit(batch((req, 5)))
        expect("cached_len after a step of 5 positions", req.cached_len, 5)
        req.device_len = 6
        expect("extend_len of the next step", req.extend_len, 1)
        cache.commit(batch((req, 1)))
        expect("cached_len after one more position", req.cached_len, 6)

    def test_a_step_may_be_a_part_of_the_prompt(self):
        cache, req = SingleCacheManager(100), request(5)
        cache.admit(req)
        cache.commit(batch((req, 3)))
        expect("cached_len after a step of 3 of 5 positions", req.cached_len, 3)


SLOTS = 8


def cached_attention() -> tuple[CachedAttention, SimpleNamespace]:
    """Two layers, 2 KV heads of 8 numbers, a pool of 8 slots filled with a number that would be noticed."""
    pool = SimpleNamespace(
        k=[torch.full((SLOTS, 2, 8), 50.0) for _ in range(2)], v=[torch.full((SLOTS, 2, 8), 50.0) for _ in range(2)]
    )
    return CachedAttention(cpu_kernels(), pool, torch.device("cpu")), pool


def step(cached: int, new: int):
    """A step that computes `new` positions behind `cached` ones."""
    req = request(cached + new)
    req.cached_len = cached
    return batch((req, new))


class Test_3_2:
    """plan"""

    def test_position_p_lies_in_slot_p(self):
        attend, _ = cached_attention()
        expect("out_loc of 3 new tokens", attend.plan(step(0, 3)).out_loc, [0, 1, 2])
        expect("out_loc of 1 new token behind 5 cached ones", attend.plan(step(5, 1)).out_loc, [5])

    def test_queries_are_the_new_tokens_keys_are_all(self):
        m = cached_attention()[0].plan(step(2, 3))
        expect("(extend_len, seq_len) of 3 new tokens behind 2", (m.extend_len, m.seq_len), (3, 5))
        expect("cu_seqlens_q, cu_seqlens_k", [m.cu_seqlens_q.tolist(), m.cu_seqlens_k.tolist()], [[0, 3], [0, 5]])

    def test_the_decode_kernel_gets_one_length_for_each_request(self):
        m = cached_attention()[0].plan(step(5, 1))
        expect("cache_seqlens of 1 new token behind 5", m.cache_seqlens, [6])

    def test_kernels_ask_for_32_bit_lengths(self):
        m = cached_attention()[0].plan(step(2, 3))
        kinds = {str(x.dtype) for x in (m.cu_seqlens_q, m.cu_seqlens_k, m.cache_seqlens)}
        expect("dtypes of cu_seqlens_q, cu_seqlens_k, cache_seqlens", kinds, {"torch.int32"})


def text(length: int) -> list[torch.Tensor]:
    """q [length, 4 heads, 8], k and v [length, 2 heads, 8], random."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, heads, 8, generator=generator) for heads in (4, 2, 2)]


class Test_3_3:
    """CachedAttention.__call__"""

    def test_new_keys_and_values_go_to_their_slots(self):
        (attend, pool), (q, k, v) = cached_attention(), text(3)
        attend(attend.plan(step(0, 3)), 0, q, k, v)
        expect_close("the first 3 slots of the pool's K", pool.k[0][:3], k)
        expect_close("the first 3 slots of the pool's V", pool.v[0][:3], v)
        expect("slot 3, which nobody wrote to", pool.k[0][3, 0, 0].item(), 50.0)

    def test_a_prompt_sees_itself(self):
        (attend, _), (q, k, v) = cached_attention(), text(5)
        expect_close("attention of a prompt of 5", attend(attend.plan(step(0, 5)), 0, q, k, v), attention(q, k, v))

    def test_a_new_token_sees_all_that_is_cached_and_itself(self):
        (attend, _), (q, k, v) = cached_attention(), text(6)
        attend(attend.plan(step(0, 5)), 0, q[:5], k[:5], v[:5])
        out = attend(attend.plan(step(5, 1)), 0, q[5:], k[5:], v[5:])
        expect_close("attention of token 5 behind a prompt of 5", out, attention(q[5:], k, v))

    def test_several_new_tokens_behind_cached_ones(self):
        (attend, _), (q, k, v) = cached_attention(), text(6)
        attend(attend.plan(step(0, 2)), 0, q[:2], k[:2], v[:2])
        out = attend(attend.plan(step(2, 4)), 0, q[2:], k[2:], v[2:])
        expect_close("attention of 4 tokens behind 2", out, attention(q[2:], k, v))

    def test_every_layer_has_its_own_pool(self):
        (attend, pool), (q, k, v) = cached_attention(), text(3)
        out = attend(attend.plan(step(0, 3)), 1, q, k, v)
        expect_close("attention in layer 1", out, attention(q, k, v))
        expect("slot 0 of layer 0, which had no call", pool.k[0][0, 0, 0].item(), 50.0)
