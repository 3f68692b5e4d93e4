"""A draw from softmax(logits / temperature) in one pass over the logits, in Triton.

The Gumbel-max trick turns a draw into an argmax: add noise to each logit, take the largest. The noise is a hash of the
row's key and the token (the one of stage 2's sampler, bit for bit), so neither noise nor probabilities are ever stored.
Gumbel noise is -log of an exponential variable, so the largest logit + noise is also the smallest exponential * e^-logit:
in that form an element needs one logarithm instead of two, and arithmetic is what takes the time here. So most elements
do not get even that one: an exponential variable lies close above the uniform one that it is made of, which nearly always
leaves a single candidate in a block of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4  # tokens and warps of a program
NUMBERS = ["inv_temperature_ptr", "low_ptr", "high_ptr"]  # one of each for a row: how they are aligned does not matter


def gumbel_argmax(logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """The token with the largest logit * inv_temperature + noise in each row; of equal ones the first.

    logits [S, V], the last dimension contiguous; inv_temperature [S] float32, 0 for a greedy row (no noise there);
    key_low and key_high [S] int32 hold the halves of each row's key. Returns [S] int64.
    """
    rows, vocab = logits.shape
    block = 1024 if rows < 16 else BLOCK  # even a single row should fill the chip
    blocks = triton.cdiv(vocab, block)
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_block[(blocks, rows)](
        logits, inv_temperature, key_low, key_high, where, logits.stride(0), VOCAB=vocab, BLOCK=block, num_warps=WARPS
    )
    _best_of_row[(rows,)](
        logits, inv_temperature, key_low, key_high, where, tokens, logits.stride(0), blocks,
        VOCAB=vocab, BLOCK=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return tokens


@triton.jit
def _uniform(token, key_low, key_high):
    """Random float32 in (0, 2 ** 32], one for each int32 token: lowbias32 (C. Wellons), keyed with 32 bits on each side."""
    x = token.to(tl.uint32) * 0x9E3779B1 + key_low.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16) ^ key_high.to(tl.uint32)
    return x.to(tl.float32) + 0.5


@triton.jit
def _exponential(uniform):
    """The exponential variables that belong to these random numbers."""
    u = tl.minimum(uniform * 2.0**-32, 1 - 2.0**-24)
    # -log1p(-u): its series where u is small, for 1 - u would drop the bits that the likeliest winners are made of
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 2.0**-4, series, -tl.log(1 - u))


@triton.jit(do_not_specialize_on_alignment=NUMBERS)
def _best_of_block(
    logits_ptr, inv_temperature_ptr, low_ptr, high_ptr, where_ptr, logits_row,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = tl.arange(0, BLOCK)
    token = block * BLOCK + at
    logits = tl.load(logits_ptr + row * logits_row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    inv_temperature = tl.load(inv_temperature_ptr + row)
    where_ptr += row * tl.num_programs(0) + block
    top = tl.maximum(tl.max(logits, 0), -1e30)  # a block of nothing but -inf must not become NaN
    if inv_temperature > 0:
        uniform = _uniform(token, tl.load(low_ptr + row), tl.load(high_ptr + row))
        weight = tl.exp((top - logits) * inv_temperature)
        cost = uniform * weight
        # an exponential lies between u and u (1 - u / 2) / (1 - u); the ratio grows with u, and no weight is below 1
        least = tl.min(cost, 0)
        u = least * 2.0**-32
        limit = tl.where(u < 0.9, least * ((1 - u / 2) / (1 - u) + 1e-5), 0.0)
        found = tl.sum(tl.where(cost <= limit, 2 * BLOCK + at, 0), 0)  # how many, and where if it is one
        if found // (2 * BLOCK) == 1:
            winner = found % (2 * BLOCK)
        else:
            cost = _exponential(uniform) * weight
            winner = tl.min(tl.where(cost == tl.min(cost, 0), at, BLOCK - 1), 0)
    else:
        winner = tl.min(tl.where(logits == tl.max(logits, 0), at, BLOCK - 1), 0)
    tl.store(where_ptr, tl.minimum(block * BLOCK + winner, VOCAB - 1))


@triton.jit(do_not_specialize_on_alignment=NUMBERS)
def _best_of_row(
    logits_ptr, inv_temperature_ptr, low_ptr, high_ptr, where_ptr, tokens_ptr, logits_row, blocks,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = block < blocks
    token = tl.load(where_ptr + row * blocks + block, mask=mask, other=0)
    scores = tl.load(logits_ptr + row * logits_row + token, mask=mask, other=float("-inf")).to(tl.float32)
    inv_temperature = tl.load(inv_temperature_ptr + row)
    if inv_temperature > 0:
        uniform = _uniform(token, tl.load(low_ptr + row), tl.load(high_ptr + row))
        scores = scores * inv_temperature - tl.log(_exponential(uniform))
    best = tl.min(tl.where((scores == tl.max(scores, 0)) & mask, token, VOCAB - 1), 0)
    tl.store(tokens_ptr + row, best.to(tl.int64))
