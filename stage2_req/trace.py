"""A look into the steps: wrap any runner to keep a list of what it was asked to do."""

from typing import NamedTuple

from stage2_req.parts import Runner
from stage2_req.req import Batch, Samples


class TraceRow(NamedTuple):
    step: int
    uid: int
    cached_len: int  # before the step
    device_len: int
    extend_len: int  # positions computed in this step
    samples: bool


class TracedRunner:
    def __init__(self, runner: Runner):
        self.runner = runner
        self.clear()

    def clear(self) -> None:
        self.rows, self.step = [], 0

    def forward(self, batch: Batch) -> Samples:
        columns = (batch.reqs, batch.prefix_lens.tolist(), batch.extend_lens.tolist(), batch.sample_mask.tolist())
        for req, start, length, samples in zip(*columns, strict=True):
            self.rows.append(TraceRow(self.step, req.uid, start, req.device_len, length, samples))
        self.step += 1
        return self.runner.forward(batch)
