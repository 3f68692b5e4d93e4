"""Attention of many new tokens over a paged cache, in Triton: flash-attn's varlen function for any page size.

The online softmax over tiles of keys (Dao et al., 2022). A tile of queries of one head sits in one program, which walks
over the keys that it may see, page by page; the keys that every one of its queries may see need no mask. A sequence's
last queries see most and start first.

Where sequences are of much the same length, a program's place in the grid says which tile of which sequence it computes.
Where they are not, most of such a grid would find nothing to do: there every program searches. Either way the grid
depends on what the host knows without a look at the device, so a launch can be captured in a CUDA graph, and replayed
for other sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import pdl, wait_for_the_kernel_before

# Measured on an H200. Looking slots up in pages takes arithmetic, which more queries a program share.
ROWS, COLS, STAGES = {False: 64, True: 128}, 64, 3
SEQUENCES = 128  # that a program looks at together while it searches for its own


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention of several sequences laid end to end.

    q [Tq, Hq, D]; k, v [Tk, Hkv, D], or pages [num_pages, page_size, Hkv, D] of any size with block_table [B, P] int32.
    Sequence b has queries cu_seqlens_q[b]:cu_seqlens_q[b+1] and as many keys as cu_seqlens_k says (both int32 [B + 1]).
    With `causal`, its last query sees all its keys, the one before that one less, and so on; one that sees none gets
    zeros. Returns [Tq, Hq, D].
    """
    (tokens, heads, dim), heads_kv, batch = q.shape, k.shape[-2], len(cu_seqlens_q) - 1
    assert k.stride() == v.stride() and q.stride(2) == k.stride(-1) == 1
    paged = block_table is not None
    assert not paged or block_table.stride(1) == 1 or block_table.shape[1] == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, cols, stages = ROWS[paged], COLS, STAGES
    if q.element_size() > 2:
        rows, cols, stages = 32, 32, 2
    tiles, most = triton.cdiv(max_seqlen_q, rows), triton.cdiv(tokens, rows) + batch  # of the longest; of all together
    search = tiles * batch > 2 * most
    _attend[(most, heads) if search else (tiles, heads, batch)](
        q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, out, batch, dim**-0.5 * 1.4426950408889634,
        *q.stride()[:2], k.stride(0) if paged else 0, *k.stride()[-3:-1], block_table.stride(0) if paged else 0,
        SEARCH=search, PAGED=paged, PAGE=k.shape[1] if paged else 1, CAUSAL=causal, GROUP=heads // heads_kv, DIM=dim,
        PADDED_DIM=max(16, triton.next_power_of_2(dim)), ROWS=rows, COLS=cols, SEQUENCES=SEQUENCES,
        num_warps=4, num_stages=stages, **pdl(q.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["batch", "table_row"], do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"])
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, cu_q_ptr, cu_k_ptr, out_ptr, batch, scale,
    q_row, q_head, kv_page, kv_row, kv_head, table_row,
    SEARCH: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head of one sequence, against COLS keys at a time."""
    if PDL:
        wait_for_the_kernel_before()
    tile, head, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SEARCH:
        sequence, before = _find(tile, cu_q_ptr, batch, ROWS, SEQUENCES)
        if sequence == batch:
            return
        tile -= before
    sequence = sequence.to(tl.int64)
    first_q, first_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    num_q, num_k = tl.load(cu_q_ptr + sequence + 1) - first_q, tl.load(cu_k_ptr + sequence + 1) - first_k
    if tile * ROWS >= num_q:
        return
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    is_dim = dims < DIM
    mask = (row < num_q)[:, None] & is_dim[None, :]
    at = (first_q + row).to(tl.int64)[:, None]
    q = tl.load(q_ptr + at * q_row + head * q_head + dims[None, :], mask=mask, other=0.0)
    k_ptr += head // GROUP * kv_head
    v_ptr += head // GROUP * kv_head
    if PAGED:
        table_ptr += sequence * table_row
    else:
        k_ptr += first_k.to(tl.int64) * kv_row
        v_ptr += first_k.to(tl.int64) * kv_row

    position = num_k - num_q + row  # of each query among the keys
    seen_by_one, seen_by_all = num_k, num_k
    if CAUSAL:
        seen_by_one = tl.minimum(num_k, num_k - num_q + (tile + 1) * ROWS)
        seen_by_all = tl.maximum(num_k - num_q + tile * ROWS + 1, 0)
    seen_by_all = seen_by_all // COLS * COLS
    top = tl.full([ROWS], float("-inf"), tl.float32)  # the online softmax: maximum, sum, and weighted values so far
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    top, total, acc = _walk(
        q, k_ptr, v_ptr, table_ptr, top, total, acc, 0, seen_by_all, num_k, position, scale, kv_page, kv_row,
        PAGED, PAGE, False, False, DIM, PADDED_DIM, COLS,
    )  # fmt: skip
    top, total, acc = _walk(
        q, k_ptr, v_ptr, table_ptr, top, total, acc, seen_by_all, seen_by_one, num_k, position, scale, kv_page, kv_row,
        PAGED, PAGE, True, CAUSAL, DIM, PADDED_DIM, COLS,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = at * (tl.num_programs(1) * DIM) + head * DIM
    tl.store(out_ptr + at + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find(tile, cu_q_ptr, batch, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence that the tile belongs to, or `batch` if there are not so many, and the tiles of those before it."""
    sequence, before, seen = 0, 0, 0
    for start in range(0, batch, SEQUENCES):
        at = start + tl.arange(0, SEQUENCES)
        bounds = tl.load(cu_q_ptr + at, mask=at < batch, other=0)
        tiles = tl.cdiv(tl.load(cu_q_ptr + at + 1, mask=at < batch, other=0) - bounds, ROWS)
        ends = seen + tl.cumsum(tiles, 0)
        is_before = (ends <= tile) & (at < batch)
        sequence += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return sequence, before


@triton.jit
def _walk(
    q, k_ptr, v_ptr, table_ptr, top, total, acc, begin, end, num_k, position, scale, kv_page, kv_row,
    PAGED: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Take the keys from `begin` to `end` into the softmax; without MASKED every query sees all of them."""
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < DIM
    for start in range(begin, end, COLS):
        col = start + tl.arange(0, COLS)
        is_col = col < num_k
        if PAGED:
            pages = (
                tl.load(table_ptr + col // PAGE, mask=is_col, other=0) if MASKED else tl.load(table_ptr + col // PAGE)
            )
            at = pages.to(tl.int64) * kv_page + col % PAGE * kv_row
        else:
            at = col.to(tl.int64) * kv_row
        mask = is_dim[None, :]
        if MASKED:
            mask = mask & is_col[:, None]
        k = tl.load(k_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale  # [ROWS, COLS]
        if MASKED:
            seen = is_col[None, :]
            if CAUSAL:
                seen = seen & (col[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top > float("-inf"), new_top, 0.0) if MASKED else new_top  # a query may have seen none yet
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(probs, 1)
        top = new_top
    return top, total, acc
