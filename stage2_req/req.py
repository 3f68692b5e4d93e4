"""Req: one request and how far it has come. Batch: one step, as it was decided. ForwardBatch: the same for the device.
Samples: what comes of it. Output: one token on its way out.

Three lengths say where a request stands, and their difference is what a step computes:

    cached_len <= device_len <= max_device_len        extend_len = device_len - cached_len

The first `cached_len` positions have their K and V in memory; `device_len` positions have a token on the device. A
prompt is `extend_len = prompt_len`, a decode step `extend_len = 1`, and nothing else distinguishes the two.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stage2_req.params import SamplingParams

Metadata = TypeVar("Metadata")  # what an attention derives from a batch, once a step


class Logprobs(NamedTuple):
    """Of one token, under the model's own distribution (before penalties, temperature and filters)."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, log-probability), likeliest first


class Req:
    """A request (vLLM: Request, its state and its sequence in one).

    Written by others: cached_len and cached_tokens by the cache manager, device_len by the engine, all the rest by the
    scheduler.
    """

    def __init__(
        self,
        uid: int,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        max_len: int,
        eos_ids: frozenset[int],
    ):
        self.uid, self.params, self.seed = uid, params, seed
        self.stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_ids
        self.token_ids = list(prompt_ids)  # the prompt and every token that the host has seen
        self.prompt_len = len(prompt_ids)
        self.cached_len = 0
        self.device_len = self.prompt_len
        self.max_device_len = min(self.prompt_len + params.max_tokens, max_len + 1)  # the last token needs no slot
        self.cached_tokens: int | None = None  # of the prompt: in the cache already when it was first admitted
        self.finish_reason: str | None = None  # eos | stop_token | max_tokens | length | abort
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = [None]  # as far as known; of the first token there is none
        self.arrived_at = time.perf_counter()
        self.admitted_at = self.first_token_at = self.finished_at = 0.0

    @property
    def extend_len(self) -> int:
        """Positions still to compute; 0 once the last allowed token has been sampled."""
        return self.device_len - self.cached_len if self.device_len < self.max_device_len else 0

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    def reason_to_stop(self, token: int) -> str | None:
        """Why the text ends with this token, which has just been appended, or None."""
        if token in self.stop_ids:
            return "stop_token" if token in self.params.stop_token_ids else "eos"
        if len(self.token_ids) < self.max_device_len:
            return None
        return "max_tokens" if len(self.token_ids) == self.prompt_len + self.params.max_tokens else "length"


@dataclass(frozen=True, eq=False)
class Batch:
    """One step, as the scheduler decided it. Frozen, because the requests' own lengths move on before the host reads
    the tokens of the step. Arrays are [B], one entry per request, on the host."""

    reqs: tuple[Req, ...]  # those with one new position first
    num_decodes: int  # how many of those there are
    table_idx: np.ndarray  # the cache manager's own index of each request
    prefix_lens: np.ndarray  # positions that are cached
    extend_lens: np.ndarray  # new positions, which this step computes
    seq_lens: np.ndarray  # their sum
    sample_mask: np.ndarray  # does the step reach the request's newest token, so that the next one is sampled?
    sampled: tuple[Req, ...]  # [S] the requests for which it does

    @classmethod
    def build(cls, picks: Sequence[tuple[Req, int]], table_idx: Sequence[int] | np.ndarray) -> "Batch | None":
        """picks: (request, how many of its positions to compute), whose memory is allocated. None without any."""
        if not picks:
            return None
        reqs, lens = zip(*picks, strict=True)
        extend_lens, table_idx = np.array(lens), np.asarray(table_idx, np.int64)
        is_decode = extend_lens == 1
        num_decodes = int(is_decode.sum())
        if not is_decode[:num_decodes].all():
            order = np.argsort(~is_decode, kind="stable")
            reqs, extend_lens, table_idx = tuple(reqs[i] for i in order), extend_lens[order], table_idx[order]
        prefix_lens = np.fromiter(map(attrgetter("cached_len"), reqs), np.int64, len(reqs))
        seq_lens = prefix_lens + extend_lens
        mask = seq_lens == np.fromiter(map(attrgetter("device_len"), reqs), np.int64, len(reqs))
        sampled = reqs if mask.all() else tuple(req for req, samples in zip(reqs, mask, strict=True) if samples)
        return cls(reqs, num_decodes, table_idx, prefix_lens, extend_lens, seq_lens, mask, sampled)

    @property
    def num_tokens(self) -> int:
        return int(self.extend_lens.sum())

    def input_ids(self) -> np.ndarray:
        """The tokens at the new positions, [T] int64."""
        ids = []
        for req, start, end in zip(self.reqs, self.prefix_lens.tolist(), self.seq_lens.tolist(), strict=True):
            ids += req.token_ids[start:end]
        return np.array(ids)

    def positions(self) -> np.ndarray:
        """[T] int64"""
        if self.num_decodes == len(self.reqs):
            return self.prefix_lens
        offsets = self.seq_lens - self.extend_lens.cumsum()
        return np.arange(self.num_tokens) + np.repeat(offsets, self.extend_lens)

    def last_indices(self) -> np.ndarray:
        """Where among the T tokens those are whose logits are sampled, [S] int64."""
        return (self.extend_lens.cumsum() - 1)[self.sample_mask]


@dataclass(frozen=True, eq=False)
class ForwardBatch(Generic[Metadata]):
    """What one pass of the model needs, on the device."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] integers
    last_indices: Tensor | None  # [S + P] the tokens whose logits are sampled, then those that are scored; None: all
    metadata: Metadata  # what the attention derived from the batch


@dataclass(eq=False)
class Samples:
    """What a step sampled."""

    tokens: Tensor  # [S] int64
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None  # chosen [S], top values [S, k], top ids [S, k]
    prompt_logprobs: tuple[Tensor, Tensor, Tensor] | None = None  # the same of the P prompt tokens that were scored

    def to_host(self) -> tuple[list[int], list[Logprobs] | None, list[Logprobs] | None]:
        """tokens, logprobs and prompt_logprobs. Waits for the device."""
        return self.tokens.tolist(), entries(self.logprobs), entries(self.prompt_logprobs)


def entries(logprobs: tuple[Tensor, Tensor, Tensor] | None) -> list[Logprobs] | None:
    if logprobs is None:
        return None
    columns = zip(*(t.tolist() for t in logprobs), strict=True)
    return [Logprobs(chosen, list(zip(ids, top, strict=True))) for chosen, top, ids in columns]


class Output(NamedTuple):
    """One token of one request. finish_reason is set with the last."""

    req: Req
    token_id: int
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # with the first token, where asked for

    @property
    def uid(self) -> int:
        return self.req.uid


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device, without waiting for the device."""
    return pin(array, device).to(device, non_blocking=True)


def pin(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array in memory that the device can copy from on its own (on a CPU: the array itself).

    Pinned memory comes from PyTorch's caching host allocator, which hands a block out again only after the copy that
    reads it has run.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()
