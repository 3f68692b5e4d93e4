"""Matrix products of few rows, in Triton: a decode step multiplies 1 to 256 rows by every weight of the model.

Such a product takes a few microseconds, and much of that is no arithmetic: the launch, the wait for the kernel before,
the first trip to memory. Three things shorten it. Tiles are small enough, and K is cut into enough splits, that every
multiprocessor has work. For very few rows the weight takes the matrix unit's long side (`swap`), and for one row there
is no matrix unit at all. And a kernel starts before the previous one has ended (programmatic dependent launch): weights
depend on no other kernel, so it moves the first of them towards itself, and only then waits for its input.

Hence one condition: weights are constants. What writes them must not be the kernel launched just before.

Partial sums of splits are added in a fixed order, by whichever program of a tile is the last to finish; so a result
depends on the number of rows, never on timing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from common.kernels.pdl import has_pdl, pdl

MAX_ROWS = 256
MAX_COLS = 32768  # larger weights, such as a head's, keep cuBLAS busy enough
MAX_COUNTERS = 1024  # one for each tile whose K is split
SMS = 132  # what the rules below were measured for: an H100 or H200


class Config(NamedTuple):
    """Tile of rows x cols, step along K, splits of K, and how Triton is to compile it."""

    rows: int
    cols: int
    step: int
    splits: int
    swap: bool = False
    ahead: int = 2  # steps of the weight to ask for before the input is there
    warps: int = 4
    stages: int = 4


# Measured on an H200 where it beats the rule: (N, K) -> {most rows: tiles}; None: cuBLAS was faster than any that was tried.
TUNED: dict[tuple[int, int], dict[int, Config | None]] = {
    (4096, 1024): {64: Config(32, 64, 256, 1, True)},
    (1024, 2048): {
        64: Config(16, 64, 256, 1, True),
        128: Config(64, 64, 128, 2, ahead=8),
        256: Config(64, 64, 128, 1, ahead=8),
    },
    (1024, 3072): {
        64: Config(16, 64, 256, 2, True),
        128: Config(64, 64, 128, 2, ahead=8),
        256: Config(64, 64, 128, 2, ahead=8),
    },
    (6144, 1024): {256: Config(64, 64, 64, 1)},
    (6144, 4096): {128: None, 256: None},
    (4096, 4096): {64: None, 128: None},
    (4096, 14336): {
        16: Config(16, 64, 256, 2, True),
        64: Config(64, 64, 128, 2),
        128: None,
        256: None,
    },
}


def choose(rows: int, cols: int, depth: int) -> Config | None:
    """Tiles for x [rows, depth] @ weight [cols, depth].T, or None where cuBLAS is to do it."""
    limit = next((n for n in (16, 32, 64, 128, MAX_ROWS) if rows <= n), None)
    if limit is None or cols > MAX_COLS:
        return None
    tuned = TUNED.get((cols, depth), {})
    return tuned[limit] if limit in tuned else _rule(limit, cols, depth)


def _rule(rows: int, cols: int, depth: int) -> Config | None:
    """The largest tiles that still employ most of the chip, in a single wave."""
    if rows <= 32:
        swap, tile, step, width, most = True, rows, 256, 64, SMS // 2
    else:
        swap, tile, step, most = False, 64, 128, SMS
        width = next((n for n in (128, 64) if rows // tile * (cols // n) >= 96), 32)
    tiles, splits = rows // tile * (cols // width), 1
    while 0 < 2 * splits * tiles <= most and depth % (2 * splits * step) == 0:
        splits *= 2
    if cols % width or depth % step or (rows > 64 and tiles > SMS) or (splits > 1 and tiles > MAX_COUNTERS):
        return None
    return Config(tile, width, step, splits, swap)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, counters: Tensor | None = None) -> Tensor:
    """F.linear for inference, faster for up to 256 rows in half precision on a Hopper GPU; elsewhere the same.

    x [T, K], weight [N, K], bias [N] -> [T, N]. counters: zeros [MAX_COUNTERS] int32, which are zeros again afterwards;
    calls that may overlap must not share them.
    """
    depth = x.shape[-1]
    suits = (
        has_pdl(x.device) and x.dim() == 2 and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    )
    if not suits or not 0 < len(x) <= MAX_ROWS or not (_is_aligned(x) and _is_aligned(weight)):
        return F.linear(x, weight, bias)
    if len(x) == 1 and weight.shape[0] % 8 == 0 and depth % 1024 == 0 and depth <= 32768:
        return launch_row(x, weight, bias)
    config = choose(len(x), weight.shape[0], depth)
    if config is None:
        return F.linear(x, weight, bias)
    return launch(config, x, weight, bias, counters)


def _is_aligned(x: Tensor) -> bool:
    """As the tensor copy engine demands it."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor | None) -> Tensor:
    """`linear` with these tiles; N is a multiple of config.cols, and K one of config.step * config.splits."""
    (rows, depth), cols = x.shape, weight.shape[0]
    assert weight.stride(0) == depth, "a weight's rows lie side by side"
    tiles = triton.cdiv(rows, config.rows) * (cols // config.cols)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    partial = out
    if config.splits > 1:
        partial = out.new_empty((config.splits, rows, cols), dtype=torch.float32)
        counters = out.new_zeros(tiles, dtype=torch.int32) if counters is None else counters
        assert len(counters) >= tiles
    boxes = (
        TensorDescriptor(t, t.shape, t.stride(), [n, config.step]) for t, n in ((x, config.rows), (weight, config.cols))
    )
    _linear[(tiles, config.splits)](
        *boxes, weight, bias, out, partial, counters, rows, cols, depth,
        ROWS=config.rows, COLS=config.cols, STEP=config.step, SPLITS=config.splits, SWAP=config.swap,
        AHEAD=config.ahead, num_warps=config.warps, num_stages=config.stages, **pdl(x.device),
    )  # fmt: skip
    return out


def launch_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for one row: x [1, K]; N is a multiple of 8 and K one of 1024."""
    depth, size = x.shape[1], weight.shape[0]
    step = 1024 if depth % 2048 else 2048
    cols, warps = (8, 4) if size >= 16384 else (4, 4 if depth == 1024 else 8)
    out = torch.empty((1, size), dtype=x.dtype, device=x.device)
    _linear_row[(size // cols,)](
        x, weight, bias, out, DEPTH=depth, COLS=cols, STEP=step, num_warps=warps, **pdl(x.device)
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_box, weight_box, weight_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, rows, cols, depth,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, ROWS)
    tile, split = tl.program_id(0), tl.program_id(1)
    first_row, first_col = tile % blocks * ROWS, tile // blocks * COLS
    share = depth // (SPLITS * STEP) * STEP
    start = split * share
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for the end of this one by itself
        if first_row == 0:  # one request is enough for a line that several programs will read
            lines: tl.constexpr = STEP // 64  # of 128 bytes, in a row of a step
            line = tl.arange(0, COLS * lines)
            at = weight_ptr + (first_col + line // lines) * depth + start + line % lines * 64
            for k in range(0, min(share, AHEAD * STEP), STEP):
                _prefetch(at + k)
        gdc_wait()

    total = tl.zeros((COLS, ROWS) if SWAP else (ROWS, COLS), tl.float32)
    for k in range(start, start + share, STEP):
        x, weight = x_box.load([first_row, k]), weight_box.load([first_col, k])  # rows too many are zeros
        total = tl.dot(weight, x.T, total) if SWAP else tl.dot(x, weight.T, total)

    if SWAP:
        row, col = first_row + tl.arange(0, ROWS)[None, :], first_col + tl.arange(0, COLS)[:, None]
    else:
        row, col = first_row + tl.arange(0, ROWS)[:, None], first_col + tl.arange(0, COLS)[None, :]
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
    DEPTH: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A sum of products in registers; the first weights are there, or under way, before the input is."""
    if PDL:
        gdc_launch_dependents()
    col, step = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    weight_at = weight_ptr + col[:, None].to(tl.int64) * DEPTH + step[None, :]
    weight = tl.load(weight_at, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    total = weight.to(tl.float32) * tl.load(x_ptr + step)[None, :].to(tl.float32)
    for k in tl.static_range(STEP, DEPTH, STEP):
        weight = tl.load(weight_at + k, eviction_policy="evict_first")
        total += weight.to(tl.float32) * tl.load(x_ptr + k + step)[None, :].to(tl.float32)
    out = tl.sum(total, 1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + col).to(tl.float32)
    tl.store(out_ptr + col, out.to(out_ptr.dtype.element_ty))


class SmallBatchLinear(nn.Module):
    """An nn.Linear for inference, with the same weight: x [T, in] -> [T, out]."""

    def __init__(self, linear: nn.Linear, counters: Tensor):
        super().__init__()
        self.weight, self.bias, self.counters = linear.weight, linear.bias, counters

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.counters)


def speed_up_linears(model: nn.Module) -> None:
    """Replace every nn.Linear below `model` by one that is faster for few rows, but for those too large to gain by it.

    They share their counters, so one stream at a time may run the model. Nothing happens where `linear` is F.linear.
    """
    weight = next(model.parameters(), None)
    if weight is None or not has_pdl(weight.device) or weight.dtype not in (torch.bfloat16, torch.float16):
        return
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=weight.device)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.out_features <= MAX_COLS:
                setattr(parent, name, SmallBatchLinear(child, counters))
