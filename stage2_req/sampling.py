"""From logits to tokens, on the device, the same in any company.

Randomness has no state: the noise of a draw is a function of (seed, position, token). So a request gets the same text
whatever else is in its batch, and goes on to the same text after it was interrupted.
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from common.kernels import ops as plain_ops
from stage2_req.params import SamplingParams
from stage2_req.req import Req, Samples, upload


class GumbelSampler:
    def __init__(self, ops: ModuleType = plain_ops):
        self.ops = ops

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> Samples:
        """logits [S, V] -> one token for each of S requests."""
        params = [req.params for req in reqs]
        if all(p.plain for p in params):
            return Samples(self.pick(logits, reqs))
        tokens = self.pick(filtered(adjusted(logits, reqs), params), reqs)
        most = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        return Samples(tokens, None if most is None else top_logprobs(logits, tokens, most))

    def pick(self, logits: Tensor, reqs: Sequence[Req]) -> Tensor:
        """Tokens [S]: the likeliest, or a draw. If no request wants a draw, it is a single argmax."""
        if all(req.params.deterministic for req in reqs):
            return logits.argmax(-1)
        numbers = (inv_temperatures(reqs), *noise_keys(reqs))
        return self.draw(logits, *(upload(array, logits.device) for array in numbers))

    def draw(self, logits: Tensor, inv_temperature: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
        """Tokens [S] from softmax(logits / temperature), logits [S, V]; inv_temperature [S] float32, 0: the likeliest
        token; key_low and key_high [S] int32.

        The argmax after Gumbel noise was added is such a draw (Gumbel, 1954), without a softmax or a sum.
        """
        return self.ops.gumbel_argmax(logits, inv_temperature, key_low, key_high)


def adjusted(logits: Tensor, reqs: Sequence[Req]) -> Tensor:
    """[S, V] after penalties and biases; repetition first, as in Hugging Face, then OpenAI's two, then the bias; no end before min_tokens."""
    if not any(req.params.adjusts for req in reqs):
        return logits
    logits = logits.float().clone()
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
        if req.device_len - req.prompt_len < p.min_tokens and req.stop_ids:
            row[upload(np.fromiter(req.stop_ids, np.int64), row.device)] = -math.inf
    return logits


def filtered(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """[S, V] with -inf for what top_k, top_p and min_p rule out, in the rows that ask for it."""
    rows = [i for i, p in enumerate(params) if p.filters]
    if not rows:
        return logits
    index, logits = upload(np.array(rows), logits.device), logits.float()
    return logits.index_copy(0, index, keep_likeliest(logits[index], [params[i] for i in rows]))


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


def top_logprobs(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [S, V] -> log-probabilities of the tokens [S], and of the `most` likeliest with their ids, [S, most] each."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(most, logits.shape[1]), -1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], values, ids


def inv_temperatures(reqs: Sequence[Req]) -> np.ndarray:
    """1 / temperature [S] float32, 0 for requests that want the likeliest token."""
    return np.array([0.0 if req.params.deterministic else 1 / req.params.temperature for req in reqs], np.float32)


def noise_keys(reqs: Sequence[Req]) -> np.ndarray:
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
