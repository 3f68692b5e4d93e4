"""Overlap scheduling: the host prepares step n + 1 while the device computes step n.

The host learns tokens one step late, so it schedules without them: lengths move when a step is enqueued, and a token that
it has not seen goes from one step to the next on the device, through the future map. What it learns late is only an
end that cannot be foreseen (eos, abort): the stray token of the step under way is dropped.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.model import CausalLM
from stage2_req.engine import Engine
from stage2_req.parts import Sampler
from stage2_req.req import Batch, Output, Samples, upload
from stage2_req.runner import ModelRunner
from stage4_batch.attention import PagedAttention

UNSEEN = -1  # in place of a token id: the host has not seen it yet, the future map has it


class FutureMap:
    """The newest token of every request, on the device, by table_idx. Index -1 is a spare entry for padding."""

    def __init__(self, max_running: int, device: torch.device):
        self.tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=device)

    def resolve(self, ids: Tensor, table_idx: Tensor) -> Tensor:
        """ids [N] with tokens in place of UNSEEN; table_idx [N]: of which requests. Returns int64."""
        return torch.where(ids == UNSEEN, self.tokens[table_idx], ids)

    def store(self, table_idx: Tensor, tokens: Tensor) -> None:
        """The tokens [N] that were sampled for the requests table_idx [N]."""
        self.tokens.index_put_((table_idx,), tokens)


@dataclass(eq=False)
class HostSamples(Samples):
    """A step's samples on their way to the host, where they stay valid, whatever the device does with its memory."""

    copied: torch.cuda.Event | None = None

    @classmethod
    def copy(cls, samples: Samples) -> "HostSamples":
        # PyTorch makes the target of such a copy pinned, so that the device writes it without the host's help
        on_host = partial(Tensor.to, device="cpu", non_blocking=True, copy=True)
        logprobs = (t and tuple(map(on_host, t)) for t in (samples.logprobs, samples.prompt_logprobs))
        copies = (on_host(samples.tokens), *logprobs)
        copied = None
        if samples.tokens.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        return cls(*copies, copied)

    def to_host(self):
        """Waits for this step only, not for what was enqueued after it."""
        if self.copied:
            self.copied.synchronize()
        return super().to_host()


class FutureRunner(ModelRunner):
    """The eager runner for steps whose input the host may not know."""

    def __init__(self, model: CausalLM, attention: PagedAttention, sampler: Sampler, max_running: int):
        super().__init__(model, attention, sampler)
        self.futures = FutureMap(max_running, self.device)

    def sample(self, hidden: Tensor, batch: Batch) -> HostSamples:
        """What `compute` returns -> a token for each request in batch.sampled, on its way to the host."""
        samples = super().sample(hidden, batch)
        self.futures.store(upload(batch.table_idx[batch.sample_mask], self.device), samples.tokens)
        return HostSamples.copy(samples)

    def input_ids(self, batch: Batch) -> Tensor:
        """[T] int64"""
        host = known_ids(batch)
        ids = upload(host, self.device)
        if (host == UNSEEN).any():
            ids = self.futures.resolve(ids, upload(np.repeat(batch.table_idx, batch.extend_lens), self.device))
        return ids


def known_ids(batch: Batch) -> np.ndarray:
    """The tokens at the new positions [T] int64, UNSEEN for those that the step before is just sampling."""
    ids = []
    for req, start, end in zip(batch.reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True):
        ids += req.token_ids[start:end]
        if end > len(req.token_ids):  # at most the newest one
            ids.append(UNSEEN)
    return np.array(ids)


class OverlapEngine(Engine):
    """The three calls of a step in another order: schedule n + 1, launch n + 1, collect n."""

    in_flight: tuple[Batch, HostSamples] | None = None  # the step that has been launched and not collected

    def has_work(self) -> bool:
        return self.in_flight is not None or super().has_work()

    def step(self) -> list[Output]:
        """Enqueue one step, then collect the one before it; returns that one's tokens."""
        outputs = []
        if self.in_flight and any(req.params.needs_text for req in self.in_flight[0].sampled):
            outputs = self.collect_in_flight()
        batch = self.scheduler.schedule()
        launched = (batch, self.launch(batch)) if batch else None
        outputs += self.collect_in_flight()
        self.in_flight = launched
        return outputs

    def collect_in_flight(self) -> list[Output]:
        step, self.in_flight = self.in_flight, None
        return self.collect(*step) if step else []
