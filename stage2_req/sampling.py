"""Sampler: logits to tokens, on the device, the same in any company.

Randomness has no state: the noise of a draw is a function of (seed, position, token). So a request gets the same text
whatever else is in its batch, and goes on to the same text after it was interrupted.
"""

import math
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from common.kernels import ops as plain_ops
from stage2_req.params import SamplingParams
from stage2_req.req import Req


class Logprobs(NamedTuple):
    """Of one token, under the model's own distribution (before penalties, temperature and filters)."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass
class Samples:
    """What a step sampled, still on the device."""

    tokens: Tensor  # [S] int64
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None  # chosen [S], top values [S, k], top ids [S, k]

    def to_host(self) -> tuple[list[int], list[Logprobs] | None]:
        """Waits for the device."""
        if self.logprobs is None:
            return self.tokens.tolist(), None
        rows = zip(*(t.tolist() for t in self.logprobs), strict=True)
        return self.tokens.tolist(), [Logprobs(chosen, list(zip(ids, top, strict=True))) for chosen, top, ids in rows]


class Sampler:
    def __init__(self, ops: ModuleType = plain_ops):
        self.ops = ops

    def __call__(self, logits: Tensor, reqs: list[Req]) -> Samples:
        """logits [S, V] -> one token for each of S requests."""
        params = [req.params for req in reqs]
        if all(p.greedy for p in params):
            return Samples(logits.argmax(-1))
        scores = self.adjust(logits.float(), reqs) if any(p.adjusts for p in params) else logits
        deterministic = all(p.deterministic for p in params)
        tokens = scores.argmax(-1) if deterministic else self.draw(scores, reqs)
        return Samples(tokens, self.logprobs(logits, tokens, params))

    def adjust(self, logits: Tensor, reqs: list[Req]) -> Tensor:
        """Penalties and biases; repetition first, as in Hugging Face, then OpenAI's two, then the bias."""
        logits = logits.clone()
        for row, req in zip(logits, reqs, strict=True):
            p = req.params
            if p.repetition_penalty != 1:
                ids = upload(np.fromiter(set(req.token_ids), np.int64), row.device)
                seen = row[ids]
                row[ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
            delta = dict(p.logit_bias)
            if p.presence_penalty or p.frequency_penalty:
                for token, count in Counter(req.output_ids).items():
                    delta[token] = delta.get(token, 0.0) - p.presence_penalty - p.frequency_penalty * count
            if delta:
                values = upload(np.fromiter(delta.values(), np.float32, len(delta)), row.device)
                row.index_add_(0, upload(np.fromiter(delta, np.int64, len(delta)), row.device), values)
        return logits

    def draw(self, logits: Tensor, reqs: list[Req]) -> Tensor:
        """Tokens [S] from softmax(logits / temperature) after the filters; deterministic rows take their argmax."""
        params, device = [req.params for req in reqs], logits.device
        filtered = [i for i, p in enumerate(params) if p.filters]
        if filtered:
            rows, logits = upload(np.array(filtered), device), logits.float()
            logits = logits.index_copy(0, rows, keep_likeliest(logits[rows], [params[i] for i in filtered]))
        return self.draw_raw(logits, upload(draw_numbers(reqs), device))

    def draw_raw(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Tokens [S] from softmax(logits / temperature), logits [S, V]; numbers [3, S] as `draw_numbers` makes them."""
        inv_temperature, low, high = numbers
        return self.ops.gumbel_argmax(logits, inv_temperature.view(torch.float32), low, high)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, params: list[SamplingParams]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        most = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        if most is None:
            return None
        logprobs = logits.float().log_softmax(-1)
        values, ids = logprobs.topk(min(most, logits.shape[1]), -1)
        return logprobs.gather(-1, tokens[:, None])[:, 0], values, ids


def keep_likeliest(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """logits [S, V] with -inf for the tokens that top_k, then top_p, then min_p rule out; the likeliest always stays.

    The last two look at the probabilities after temperature.
    """

    def column(values: list[float]) -> Tensor:
        return upload(np.array(values, np.float32)[:, None], logits.device)

    size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(size, device=logits.device)
    keep = rank < column([p.top_k if p.top_k > 0 else size for p in params])
    heated = (ordered - ordered[:, :1]) * column([1 / p.temperature for p in params])
    probs = heated.masked_fill(~keep, -math.inf).softmax(-1)
    keep &= probs.cumsum(-1) - probs < column([p.top_p if p.top_p < 1 else math.inf for p in params])
    keep &= probs >= probs[:, :1] * column([p.min_p for p in params])
    keep[:, 0] = True
    return torch.full_like(logits, -math.inf).scatter_(-1, order, ordered.masked_fill(~keep, -math.inf))


def draw_numbers(reqs: list[Req]) -> np.ndarray:
    """What a draw needs of each request, [3, S] int32: the bits of its 1 / temperature (0: no noise), and its key."""
    heat = [0.0 if req.params.deterministic else 1 / req.params.temperature for req in reqs]
    return np.vstack((np.array(heat, np.float32).view(np.int32), noise_keys(reqs)))


def noise_keys(reqs: list[Req]) -> np.ndarray:
    """The low and the high 32 bits, [2, S] int32, of a hash of (seed, position); the position is the new token's.

    splitmix64 (Steele et al., 2014).
    """
    with np.errstate(over="ignore"):
        key = np.array([req.seed & 0xFFFFFFFFFFFFFFFF for req in reqs], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        key += np.array([req.device_len for req in reqs], np.uint64) * np.uint64(0xD1B54A32D192ED03)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    key ^= key >> np.uint64(31)
    return np.stack((key, key >> np.uint64(32))).astype(np.uint32).view(np.int32)
