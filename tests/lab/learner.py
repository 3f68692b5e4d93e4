"""What the lab's tests have in common: a failure says what was called, what came and what was expected."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from common.kernels import Kernels, select_kernels
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req


def plain(value):
    """Arrays and tensors as lists, so that they can be compared and read."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def expect(called: str, came, expected) -> None:
    came, expected = plain(came), plain(expected)
    assert came == expected, f"called:   {called}\ncame:     {came!r}\nexpected: {expected!r}"


def expect_close(called: str, came: torch.Tensor, expected: torch.Tensor) -> None:
    """Numbers of float32, but for rounding."""
    if came.shape != expected.shape:
        expect(f"{called}, its shape", list(came.shape), list(expected.shape))
    if not torch.allclose(came, expected, atol=1e-4):
        expect(called, came.double().round(decimals=3), expected.double().round(decimals=3))


def expect_error(called: str, function: Callable, error: type[Exception]) -> None:
    try:
        came = function()
    except error:
        return
    expect(called, f"{plain(came)!r}, and no error", error.__name__)


def request(prompt_len: int = 3, uid: int = 0, max_len: int = 100, eos: int = 99, **params) -> Req:
    """A request with the prompt 10, 11, 12, …; `eos` is the model's end token, `max_len` its longest sequence."""
    prompt = list(range(10, 10 + prompt_len))
    return Req(uid, prompt, SamplingParams(**params), seed=uid, max_len=max_len, eos_ids=frozenset([eos]))


def batch(*picks: tuple[Req, int], table_idx: Sequence[int] | None = None) -> Batch:
    """A step in which each request computes so many positions."""
    return Batch.build(picks, range(len(picks)) if table_idx is None else table_idx)


def cpu_kernels() -> Kernels:
    return select_kernels("portable", torch.device("cpu"), torch.float32, 8)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What causal attention is, in plain arithmetic: q [T, Hq, D] of the last T positions, k and v [S, Hkv, D] of all."""
    (t, heads, dim), s = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    hidden = torch.arange(s)[None] > torch.arange(s - t, s)[:, None]  # the future
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
