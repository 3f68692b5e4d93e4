"""Steps of nothing but decodes, recorded at padded batch sizes: from static buffers to static buffers."""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from common.device import pin
from stage2_req.req import Batch
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler, draw_numbers
from stage6_cudagraph.attention import StaticDecode
from stage6_cudagraph.recorder import Recorder


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then multiples of 8: dense where a padded row would be a large share of the step."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


class DecodeGraphs:
    """The recorded step ends with a draw from its own logits.

    `GraphSampler` takes those tokens where the requests ask for no more than that, and then nothing lies between a step
    and the next but one upload (and one of new pages, where there are any).
    """

    def __init__(self, eager: ModelRunner, sampler: Sampler, recorder: Recorder, max_batch: int):
        self.model, self.attention, self.sampler = eager.model, StaticDecode(eager.attention), sampler
        self.device, self.sizes = eager.device, graph_sizes(max_batch)
        self.ids = torch.zeros(max_batch, dtype=torch.int64, device=self.device)  # newest tokens in, next tokens out
        self.numbers = torch.zeros(5 * max_batch, dtype=torch.int32, device=self.device)
        self.logits: dict[int, Tensor] = {}  # size -> [size, V]
        self.drawn: Tensor | None = None  # the last logits, if self.ids holds the draws from them
        self.replays = recorder.record("decodes", self.step, self.sizes)

    def fit(self, batch: Batch) -> bool:
        count = len(batch.reqs)
        return batch.num_decode == len(batch.sampled) == count <= self.sizes[-1]

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V], valid until the next replay."""
        count = len(batch.reqs)
        size = self.sizes[bisect_left(self.sizes, count)]
        simple = all(req.params.simple for req in batch.reqs)
        self.fill(batch, size, simple)
        self.replays[size]()
        logits = self.logits[size][:count]
        self.drawn = logits if simple else None
        return logits

    def buffers(self, size: int) -> Tensor:
        """Positions, table rows, and the three numbers of a draw, [5, size]: the head of the memory, so that one copy fills it."""
        return self.numbers[: 5 * size].view(5, size)

    def fill(self, batch: Batch, size: int, simple: bool) -> None:
        """The batch into the static buffers, padding behind it up to `size`."""
        count, host = len(batch.reqs), np.zeros((5, size), np.int32)
        host[0, :count] = batch.starts
        host[1] = -1
        host[1, :count] = batch.rows
        if simple:
            host[2:, :count] = draw_numbers(batch.reqs)
        self.buffers(size).copy_(pin(host, self.device), non_blocking=True)
        if batch.input_ids.data_ptr() != self.ids.data_ptr():  # else they are what the last replay has drawn
            self.ids[:count] = batch.input_ids

    def step(self, size: int) -> None:
        """What is recorded: one decode step of `size` rows."""
        positions, rows, *numbers = self.buffers(size)
        self.attention.plan(positions, rows)
        hidden = self.model(self.ids[:size], positions, self.attention)
        self.logits[size] = self.model.head(hidden)
        self.ids[:size] = self.sampler.draw_raw(self.logits[size], numbers)
