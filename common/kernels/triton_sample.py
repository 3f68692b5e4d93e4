"""A draw from softmax(logits / temperature) in one pass over the logits, in Triton.

The Gumbel-max trick turns a draw into an argmax: add noise to each logit, take the largest. The noise is a hash of the
row's key and the token (the one of stage 2's sampler, bit for bit), so neither noise nor probabilities are ever stored.
Gumbel noise is -log of an exponential variable, so the largest logit + noise is also the smallest exponential * e^-logit:
in that form an element needs one logarithm instead of two, and arithmetic is what takes the time here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gumbel_argmax(logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """The token with the largest logit * inv_temperature + noise in each row; of equal ones the first.

    logits [S, V], the last dimension contiguous; inv_temperature [S] float32, 0 for a greedy row (no noise there);
    key_low and key_high [S] int64 hold the 32-bit halves of each row's key. Returns [S] int64.
    """
    rows, vocab = logits.shape
    block = 1024 if rows < 16 else 2048  # even a single row should fill the chip
    blocks = triton.cdiv(vocab, block)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_block[(blocks, rows)](
        logits, inv_temperature, key_low, key_high, best, where, logits.stride(0),
        VOCAB=vocab, BLOCK=block, num_warps=4,
    )  # fmt: skip
    _best_of_row[(rows,)](best, where, tokens, blocks, VOCAB=vocab, BLOCK=triton.next_power_of_2(blocks), num_warps=1)
    return tokens


@triton.jit
def _exponential(token, key_low, key_high):
    """Exponential float32 variables, one for each int32 token: lowbias32 (C. Wellons), keyed with 32 bits on each side."""
    x = token.to(tl.uint32) * 0x9E3779B1 + key_low.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16) ^ key_high.to(tl.uint32)
    u = tl.minimum((x.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log1p(-u): its series where u is small, for 1 - u would drop the bits that the likeliest winners are made of
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 2.0**-4, series, -tl.log(1 - u))


@triton.jit
def _best_of_block(
    logits_ptr, inv_temperature_ptr, low_ptr, high_ptr, best_ptr, where_ptr, logits_row,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * logits_row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    inv_temperature = tl.load(inv_temperature_ptr + row)
    if inv_temperature > 0:
        scores *= inv_temperature
        top = tl.maximum(tl.max(scores, 0), -1e30)  # a block of nothing but -inf must not become NaN
        scores = -_exponential(token, tl.load(low_ptr + row), tl.load(high_ptr + row)) * tl.exp(top - scores)
        best = tl.max(scores, 0)
        value = top - tl.log(-best)  # logit + noise: what other blocks can be compared with
    else:
        best = tl.max(scores, 0)
        value = best
    at = row * tl.num_programs(0) + block
    tl.store(best_ptr + at, value)
    tl.store(where_ptr + at, tl.min(tl.where(scores == best, token, VOCAB - 1), 0))


@triton.jit
def _best_of_row(best_ptr, where_ptr, tokens_ptr, blocks, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = block < blocks
    best = tl.load(best_ptr + row * blocks + block, mask=mask, other=float("-inf"))
    where = tl.load(where_ptr + row * blocks + block, mask=mask, other=0)
    token = tl.min(tl.where(best == tl.max(best, 0), where, VOCAB - 1), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
