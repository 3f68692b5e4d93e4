"""Matrix products of few rows, in Triton: a decode step multiplies 1 to 256 rows by every weight of the model.

Such a product takes a few microseconds. Most of them are no arithmetic: the launch, the wait for the kernel before, the
first trip to memory. Three things shorten them. Tiles are small enough, and K is cut into enough splits, that every
multiprocessor has work. For very few rows the weight takes the matrix unit's long side (`SWAP`). And a kernel starts
before the previous one has ended (programmatic dependent launch): weights depend on nobody, so it moves its share of
them towards the L2 cache, and only then waits for its input.

Partial sums of splits are added in a fixed order, by whichever program of a tile is the last to finish; so a result
depends on the number of rows, never on timing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 256
MAX_TILES = 4096  # counters, one for each tile whose K is split


class Config(NamedTuple):
    """Tile of rows x columns, step along K, splits of K, and how Triton is to compile it."""

    rows: int
    cols: int
    step: int
    splits: int
    swap: bool = False
    warps: int = 4
    stages: int = 4


def launch(
    config: Config,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    pdl: bool,
    prefetch: int = 1,
    tma: bool = False,
) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] with these tiles; N and K are multiples of them."""
    (rows, depth), cols = x.shape, weight.shape[0]
    tiles = triton.cdiv(rows, config.rows) * (cols // config.cols)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    partial = out if config.splits == 1 else out.new_empty((config.splits, rows, cols), dtype=torch.float32)
    boxes = (x, weight)
    if tma:
        boxes = (
            TensorDescriptor(t, t.shape, t.stride(), [n, config.step])
            for t, n in ((x, config.rows), (weight, config.cols))
        )
    _linear[(tiles, config.splits)](
        *boxes, weight, bias, out, partial, counters, rows, cols, depth, x.stride(0), prefetch,
        ROWS=config.rows, COLS=config.cols, STEP=config.step, SPLITS=config.splits, SWAP=config.swap,
        PDL=pdl, TMA=tma, num_warps=config.warps, num_stages=config.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def launch_row(
    cols: int, step: int, warps: int, x: Tensor, weight: Tensor, bias: Tensor | None, pdl: bool, early: bool = True
) -> Tensor:
    """The same for one row: x [1, K]."""
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _linear_row[(weight.shape[0] // cols,)](
        x, weight, bias, out, DEPTH=x.shape[1], COLS=cols, STEP=step, PDL=pdl, EARLY=early, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "prefetch"])
def _linear(
    x_ptr, weight_box, weight_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, rows, cols, depth, x_row, prefetch,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr,
    PDL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    blocks = tl.cdiv(rows, ROWS)
    tile, split = tl.program_id(0), tl.program_id(1)
    first_row, first_col = tile % blocks * ROWS, tile // blocks * COLS
    share = depth // (SPLITS * STEP) * STEP  # in a form that shows how well aligned it is
    start = split * share
    if PDL:
        if tile % blocks == 0:
            lines: tl.constexpr = STEP // 64  # of 128 bytes, in a row of a step
            line = tl.arange(0, COLS * lines)
            address = weight_ptr + (first_col + line // lines) * depth + start + line % lines * 64
            for k in range(0, min(share, prefetch * STEP), STEP):
                _prefetch(address + k)
        gdc_wait()

    step = tl.arange(0, STEP)
    if SWAP:
        row, col = first_row + tl.arange(0, ROWS)[None, :], first_col + tl.arange(0, COLS)[:, None]
        x_at, weight_at = step[:, None], step[None, :]
        total = tl.zeros((COLS, ROWS), tl.float32)
    else:
        row, col = first_row + tl.arange(0, ROWS)[:, None], first_col + tl.arange(0, COLS)[None, :]
        x_at, weight_at = step[None, :], step[:, None]
        total = tl.zeros((ROWS, COLS), tl.float32)
    if TMA:
        for k in range(start, start + share, STEP):
            x, weight = x_ptr.load([first_row, k]), weight_box.load([first_col, k])
            total = tl.dot(weight, x.T, total) if SWAP else tl.dot(x, weight.T, total)
    else:
        x_at = x_ptr + tl.where(row < rows, row, 0) * x_row + start + x_at  # rows too many: any that exists will do
        weight_at = weight_ptr + col * depth + start + weight_at
        for _ in range(0, share, STEP):
            x, weight = tl.load(x_at), tl.load(weight_at)
            total = tl.dot(weight, x, total) if SWAP else tl.dot(x, weight, total)
            x_at += STEP
            weight_at += STEP

    mask, at = row < rows, row * cols + col
    last = True
    if SPLITS > 1:
        size = rows * cols
        tl.store(partial_ptr + split * size + at, total, mask=mask)
        tl.debug_barrier()  # every thread's part is written before one of them counts
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counter_ptr + tile, 0)  # as the next call, or replay, wants it
            total = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, SPLITS):
                total += tl.load(partial_ptr + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    if last:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + col).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(pointers):
    """Ask for the 128-byte lines at these addresses to be moved into the L2 cache; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _linear_row(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    DEPTH: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row needs no matrix unit: a sum of products in registers."""
    if PDL:
        gdc_launch_dependents()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    step = tl.arange(0, STEP)
    weight_at = weight_ptr + col[:, None] * DEPTH + step[None, :]
    if EARLY:
        weight = tl.load(weight_at, eviction_policy="evict_first")
        if PDL:
            gdc_wait()
        x = tl.load(x_ptr + step)[None, :]
        total = weight.to(tl.float32) * x.to(tl.float32)
        for k in tl.static_range(STEP, DEPTH, STEP):
            weight = tl.load(weight_at + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + step)[None, :]
            total += weight.to(tl.float32) * x.to(tl.float32)
    else:
        if PDL:
            gdc_wait()
        total = tl.zeros((COLS, STEP), tl.float32)
        for k in tl.static_range(0, DEPTH, STEP):
            weight = tl.load(weight_at + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + step)[None, :]
            total += weight.to(tl.float32) * x.to(tl.float32)
    out = tl.sum(total, 1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + col).to(tl.float32)
    tl.store(out_ptr + col, out.to(out_ptr.dtype.element_ty))
