"""A look into the steps: wrap any runner to keep a record of what it was asked to do."""

from typing import NamedTuple

from torch import Tensor

from common.interfaces import Runner
from stage2_req.req import Batch


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

    def run(self, batch: Batch) -> Tensor:
        columns = (batch.reqs, batch.starts.tolist(), batch.lens.tolist(), batch.samples.tolist())
        for req, start, length, samples in zip(*columns, strict=True):
            self.rows.append(TraceRow(self.step, req.uid, start, req.device_len, length, samples))
        self.step += 1
        return self.runner.run(batch)
