"""Attention of one new token per request over a paged cache, in Triton: flash-attn's decode function for any page size.

Decoding reads every cached key and value once and computes next to nothing, so all that matters is to keep enough loads
in flight. Hence flash-decoding (Dao et al., 2023): each request's tokens are split over several programs, and a second,
small kernel merges their softmaxes. All query heads that share a KV head sit in one program, so K and V are read once.

The number of splits depends on shapes alone, never on lengths: a launch can be captured in a CUDA graph and replayed
while the requests grow. What a program does within its split follows from the length that it reads on the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import pdl, wait_for_the_kernel_before

BLOCK = 32  # tokens of K and V that a program takes at a time: small ones, so that many programs fit side by side
WARPS, STAGES = 2, 3  # STAGES - 1 blocks are on their way while one is worked on
MAX_SPLITS = 128
# Programs that a multiprocessor should get, and tokens below which one more split costs more than it hides (measured on an
# H200): for few requests, enough to hide memory latency; for more of them, enough to keep the tail of long ones short.
FEW, MANY = (4, 64), (8, 256)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of one new token per request over its cache.

    q [B, 1, Hq, D], its last dimension contiguous. Caches are [regions, max_len, Hkv, D] (request b in region
    cache_batch_idx[b], or b), or pages [num_pages, page_size, Hkv, D] of any size with block_table [B, P] int32.
    cache_seqlens [B] int32 counts the tokens of each request, the new one included if it has been stored
    before. Otherwise k and v [B, 1, Hkv, D] are appended to the cache here, by the program that holds them in registers
    anyway. A request without any token gets zeros. `causal` changes nothing for a single query. Returns [B, 1, Hq, D].
    """
    batch, queries, heads, dim = q.shape
    page_size, heads_kv = k_cache.shape[1:3]
    assert queries == 1, "one query token per request"
    assert k_cache.stride() == v_cache.stride() and q.stride(3) == k_cache.stride(3) == 1
    if k is not None:
        assert k.stride() == v.stride() and k.stride(3) == 1
    if block_table is None:  # a region is one long page
        slots = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        block_table = slots[:, None]
    assert block_table.stride(1) == 1 or block_table.shape[1] == 1

    splits, min_chunk = _split(batch * heads_kv, block_table.shape[1] * page_size, _num_sms(q.device))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = out if splits == 1 else out.new_empty((batch, heads, splits, dim), dtype=torch.float32)
    weight = partial if splits == 1 else partial.new_empty((batch, heads, splits))
    padded_dim = max(16, triton.next_power_of_2(dim))
    _attend[(heads_kv, batch, splits)](
        q, k_cache, v_cache, k, v, block_table, cache_seqlens, partial, weight, splits, dim**-0.5 * 1.4426950408889634,
        q.stride(0), q.stride(2), *k_cache.stride()[:3], *((0, 0) if k is None else (k.stride(0), k.stride(2))),
        block_table.stride(0), PAGE=page_size, GROUP=heads // heads_kv, ROWS=max(16, triton.next_power_of_2(heads // heads_kv)), DIM=dim,
        PADDED_DIM=padded_dim, BLOCK=BLOCK, MIN_CHUNK=min_chunk, WHOLE=splits == 1,
        num_warps=WARPS if q.element_size() == 2 else 4, num_stages=STAGES if q.element_size() == 2 else 2, **pdl(q.device),
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, batch, triton.cdiv(dim, 32))](
            partial, weight, out, splits,
            PADDED_SPLITS=triton.next_power_of_2(splits), DIM=dim, BLOCK=32, num_warps=1, **pdl(q.device),
        )  # fmt: skip
    return out


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _split(pairs: int, max_len: int, num_sms: int) -> tuple[int, int]:
    """Splits of each (request, KV head) pair, no more than the longest possible request can use; and their least number of tokens."""
    per_sm, chunk = MANY if pairs > num_sms else FEW
    return max(1, min(num_sms * per_sm // pairs, triton.cdiv(max_len, chunk), MAX_SPLITS)), chunk


@triton.jit(do_not_specialize=["splits", "table_row"], do_not_specialize_on_alignment=["lens_ptr"])
def _attend(
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr, table_ptr, lens_ptr, out_ptr, weight_ptr, splits, scale,
    q_batch, q_head, kv_page, kv_row, kv_head, new_batch, new_head, table_row,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, MIN_CHUNK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one request for the GROUP query heads of one KV head, padded to the ROWS that a matrix unit wants.

    WHOLE: there is one split, and out_ptr is the result [B, Hq, D]. Otherwise out_ptr [B, Hq, splits, D] float32 takes
    the split's own softmax average and weight_ptr [B, Hq, splits] the log2 of its weight in the whole.
    """
    if PDL:
        wait_for_the_kernel_before()
    # Heads vary fastest: programs that run side by side read neighbouring memory, and empty splits come last.
    head, request, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lens_ptr + request)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, splits), 16) * 16, MIN_CHUNK)  # even shares of what is there now
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    group, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    query = head * GROUP + group
    index = request * (tl.num_programs(0) * GROUP) + query
    if not WHOLE:
        index = index * splits + split
        if (begin >= end) & ((new_k_ptr is None) | (split > 0)):
            tl.store(weight_ptr + index, float("-inf"), mask=group < GROUP)
            return

    is_dim = dims < DIM
    is_query = (group < GROUP)[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + request * q_batch + query[:, None] * q_head + dims[None, :], mask=is_query, other=0.0)
    table_ptr += request * table_row
    k_ptr += head * kv_head
    v_ptr += head * kv_head

    top = tl.full([ROWS], float("-inf"), tl.float32)  # the online softmax: maximum, sum, and weighted values so far
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if new_k_ptr is not None:  # noqa: SIM102 (known when compiled; the next is not)
        if split == 0:  # the new token: into the cache, and first in the softmax, without a way back from memory
            at = request * new_batch + head * new_head + dims
            k, v = tl.load(new_k_ptr + at, mask=is_dim, other=0.0), tl.load(new_v_ptr + at, mask=is_dim, other=0.0)
            at = tl.load(table_ptr + length // PAGE).to(tl.int64) * kv_page + length % PAGE * kv_row + dims
            tl.store(k_ptr + at, k, mask=is_dim)
            tl.store(v_ptr + at, v, mask=is_dim)
            top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            total += 1
            acc += v.to(tl.float32)[None, :]
    rows = begin + tl.arange(0, BLOCK)
    pages = tl.load(table_ptr + rows // PAGE, mask=rows < end, other=0)
    for _ in range(begin, end, BLOCK):
        is_row = rows < end
        at = pages.to(tl.int64) * kv_page + rows % PAGE * kv_row  # pools outgrow 32 bits
        at = at[:, None] + dims[None, :]
        rows += BLOCK
        pages = tl.load(table_ptr + rows // PAGE, mask=rows < end, other=0)  # ahead of time: K and V wait for them
        mask = is_row[:, None] & is_dim[None, :]  # V's masked rows must be finite: they are multiplied by zero
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale  # [ROWS, BLOCK]
        scores = tl.where(is_row[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(probs, 1)
        top = new_top

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if not WHOLE:
        tl.store(weight_ptr + index, top + tl.log2(total), mask=group < GROUP)
    tl.store(out_ptr + index[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial_ptr, weight_ptr, out_ptr, splits, PADDED_SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The average of the splits' results by weight, for BLOCK dimensions of one query head: [splits, BLOCK] -> [BLOCK].

    Which splits are empty shows in their weights: no load here has to wait for another one.
    """
    if PDL:
        wait_for_the_kernel_before()
    index = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    split, dims = tl.arange(0, PADDED_SPLITS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = index * splits + split
    weight = tl.load(weight_ptr + at, mask=split < splits, other=float("-inf"))
    mask = (split < splits)[:, None] & (dims < DIM)[None, :]
    values = tl.load(partial_ptr + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    values = tl.where((weight > float("-inf"))[:, None], values, 0.0)  # an empty split has left its part unwritten
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e30))  # and an empty request has -inf only: no NaN then
    total = tl.sum(weight, 0)
    out = tl.sum(values * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + index * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DIM)
