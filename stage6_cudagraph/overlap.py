"""Overlap scheduling: the host prepares step n + 1 while the device computes step n.

The host learns tokens one step late, so it schedules without them: lengths move when a step is enqueued, and ids that
it has not seen go from one step's samples to the next step's input without leaving the device. What it learns late is
only an end that nobody could foresee (eos, abort): the stray token of the step under way is dropped.
"""

import operator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device import upload
from stage2_req.engine import Engine
from stage2_req.req import Batch, Output
from stage2_req.sampling import Samples


@dataclass
class InFlight:
    """A step that has been enqueued, its samples, and their copy on the way to the host."""

    batch: Batch
    samples: Samples
    on_host: Samples
    copied: torch.cuda.Event | None


class OverlapEngine(Engine):
    def __init__(self, *parts, **settings):
        super().__init__(*parts, **settings)
        self.in_flight: InFlight | None = None

    def has_work(self) -> bool:
        return self.in_flight is not None or super().has_work()

    def step(self) -> list[Output]:
        """Enqueue one step, then book the one before it; returns that one's tokens."""
        outputs = []
        if self.in_flight and any(req.params.penalizes for req in self.in_flight.batch.sampled):
            outputs = self.finish_step()  # penalties look at the text so far: the host has to know it
        batch = self.scheduler.schedule()
        launched = self.send(batch) if batch else None
        outputs += self.finish_step()
        self.in_flight = launched
        return outputs

    def send(self, batch: Batch) -> InFlight:
        samples = self.launch(batch)
        tensors = (samples.tokens, *(samples.logprobs or ()))
        tokens, *logprobs = (tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors)  # into pinned memory
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return InFlight(batch, samples, Samples(tokens, tuple(logprobs) or None), copied)

    def finish_step(self) -> list[Output]:
        if self.in_flight is None:
            return []
        step, self.in_flight = self.in_flight, None
        if step.copied:
            step.copied.synchronize()  # waits for this step only, not for what was enqueued after it
        return self.collect(step.batch, step.on_host)

    def input_ids(self, batch: Batch) -> Tensor:
        """The tokens [T] at the new positions; those that the host has not seen come from the step in flight."""
        if self.in_flight is None:
            return super().input_ids(batch)
        before, tokens = self.in_flight.batch.sampled, self.in_flight.samples.tokens
        decodes = batch.num_decode == len(batch.reqs) == len(batch.sampled) == len(before)
        if decodes and all(map(operator.is_, batch.sampled, before)):
            return tokens  # the same requests decode again: the common case
        index = {req.uid: i for i, req in enumerate(before)}
        ids, sources, targets = [], [], []
        for req, start, end in zip(batch.reqs, batch.starts.tolist(), batch.ends.tolist(), strict=True):
            ids += req.token_ids[start:end]
            if end > len(req.token_ids):  # at most the newest token is unseen
                sources.append(index[req.uid])
                targets.append(len(ids))
                ids.append(0)
        ids = upload(np.array(ids), self.device)
        if sources:
            source, target = upload(np.array((sources, targets)), self.device)
            ids.index_copy_(0, target, tokens[source])
        return ids
