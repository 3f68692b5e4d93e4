"""Req: one request and how far it has come. Batch: one step. Output: one token on its way out.

Three lengths tell where a request stands, and their difference is what a step computes:

    cached_len <= device_len <= max_device_len        extend_len = device_len - cached_len

The first `cached_len` positions have their K and V in memory; `device_len` positions have a token on the device. A
prompt is `extend_len = prompt_len`, a decode step `extend_len = 1`, and nothing else tells the two apart.
"""

import time
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from common.device import upload

if TYPE_CHECKING:
    from stage2_req.params import SamplingParams
    from stage2_req.sampling import Logprobs


class Req:
    """A request (vLLM: Request, its state and its sequence in one).

    Written by others: cached_len by the cache manager, device_len by the engine, all the rest by the scheduler.
    """

    def __init__(
        self,
        uid: int,
        prompt_ids: list[int],
        params: "SamplingParams",
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
        self.max_device_len = min(self.prompt_len + params.max_tokens, max_len + 1)  # the last token needs no row
        self.finish_reason: str | None = None  # eos | stop_token | max_tokens | length | abort
        self.logprobs: list[Logprobs] = []
        self.arrived_at = time.perf_counter()
        self.first_token_at = self.finished_at = 0.0

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


class Batch:
    """One step, frozen when it is scheduled, because the requests' own lengths move on before the host reads the tokens.

    Requests with one new position come first, the longest at the head: a device that starts with the longest pieces of
    work finishes all of them soonest. Arrays are [B] int64 on the host: `lens` new positions of each request,
    which are positions `starts` to `ends`, `num_tokens` in all; `samples`: is the last of them the request's newest token, so that the next
    one is to be sampled? `rows` is the cache manager's own index of each request.
    """

    def __init__(self, picks: list[tuple[Req, int]]):
        """picks: (request, how many of its positions to compute)."""
        decodes = [pick for pick in picks if pick[1] == 1]
        chunks = [pick for pick in picks if pick[1] > 1] if len(decodes) < len(picks) else []
        decodes.sort(key=lambda pick: -pick[0].cached_len)
        self.num_decode = len(decodes)
        self.reqs, lens = zip(*decodes, *chunks, strict=True)
        self.lens, self.num_tokens = np.array(lens), sum(lens)
        self.starts = self.gather("cached_len")
        self.ends = self.starts + self.lens
        self.samples = self.ends == self.gather("device_len")
        self.sampled = [req for req, samples in zip(self.reqs, self.samples.tolist(), strict=True) if samples]
        self.rows: np.ndarray | None = None

    def gather(self, attribute: str) -> np.ndarray:
        """One number of each request, [B] int64."""
        return np.fromiter(map(attrgetter(attribute), self.reqs), np.int64, len(self.reqs))

    def token_positions(self) -> np.ndarray:
        """The position of every token of the step [T], on the host."""
        return np.arange(self.num_tokens) + np.repeat(self.ends - self.lens.cumsum(), self.lens)

    def last_tokens(self) -> np.ndarray:
        """Where in the step the tokens are whose logits are to be sampled [S], on the host."""
        return (self.lens.cumsum() - 1)[self.samples]

    def prepare(self, device: torch.device) -> None:
        """Both as tensors on the device: positions [T] and last_index [S]."""
        self.positions = upload(self.token_positions(), device)
        self.last_index = upload(self.last_tokens(), device)


class Output(NamedTuple):
    """One token of one request. finish_reason is set with the last."""

    req: Req
    token_id: int
    finish_reason: str | None = None
    logprobs: "Logprobs | None" = None

    @property
    def uid(self) -> int:
        return self.req.uid
