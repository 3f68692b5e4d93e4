"""The runner that replays captured steps, and the steps of nothing but decodes.

A graph repeats the same kernels on the same addresses. So its inputs lie in static buffers, and a step is padded up to
the next size that was captured.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config import EngineConfig
from stage2_req.req import Batch, ForwardBatch, Samples, pin
from stage2_req.sampling import inv_temperatures, noise_keys
from stage4_batch.attention import PagedMetadata
from stage6_cudagraph.attention import padded_decodes
from stage6_cudagraph.capture import Capturer
from stage6_cudagraph.mixed_graphs import MixedGraphs
from stage6_cudagraph.overlap import FutureRunner, HostSamples, known_ids


class GraphRunner:
    """Replays a graph where one fits; hands everything else to the eager runner."""

    def __init__(self, eager: FutureRunner, config: EngineConfig):
        self.eager, self.num_replays = eager, 0
        max_batch = min(config.graph_max_batch, config.max_running)
        max_tokens = min(config.graph_max_tokens, config.max_batch_tokens)
        capturer = Capturer(eager.device)
        mixed = MixedGraphs(eager, capturer, max_batch, max_tokens)  # first: they need the most scratch memory
        self.graphs = (DecodeGraphs(eager, capturer, max_batch), mixed)
        capturer.report()

    def forward(self, batch: Batch) -> HostSamples:
        for graphs in self.graphs:
            if graphs.fit(batch):
                self.num_replays += 1
                return graphs.forward(batch)
        return self.eager.forward(batch)


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then multiples of 8: dense where a padding entry would be a large share of the step."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


@dataclass(eq=False)
class DecodeInputs:
    """All that the host knows of a step of decodes: [size] int32 each.

    There are two: of host arrays, to be filled, and of the static tensors to which these are uploaded as one piece.
    """

    input_ids: Tensor | np.ndarray  # the newest tokens, or UNSEEN
    positions: Tensor | np.ndarray
    table_idx: Tensor | np.ndarray  # -1: padding
    inv_temperature: Tensor | np.ndarray  # the bits of a float32
    key_low: Tensor | np.ndarray
    key_high: Tensor | np.ndarray


FIELDS = len(DecodeInputs.__dataclass_fields__)


class DecodeGraphs:
    """Steps of nothing but decodes, captured at padded batch sizes.

    A captured step reads its tokens from the future map, and ends with a draw that writes the next ones there. So
    nothing lies between two steps but one upload (and one of new pages, where there are any).
    """

    def __init__(self, eager: FutureRunner, capturer: Capturer, max_batch: int):
        self.eager, self.device, self.sizes = eager, eager.device, graph_sizes(max_batch)
        self.memory = torch.zeros(FIELDS * max_batch, dtype=torch.int32, device=self.device)
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}  # size -> hidden states [size, hidden_size], tokens [size]
        self.replays = capturer.capture("decodes", self.captured_step, self.sizes)

    def fit(self, batch: Batch) -> bool:
        """Are all of its requests decodes, few enough, and all sampled? (The last position of a chunk may be one that is
        not: the prompt goes on.)"""
        count = len(batch.reqs)
        return batch.num_decodes == count and len(batch.sampled) == count and count <= self.sizes[-1]

    def forward(self, batch: Batch) -> HostSamples:
        count = len(batch.reqs)
        size = self.sizes[bisect_left(self.sizes, count)]
        plain = all(req.params.plain for req in batch.reqs)
        self.fill(batch, size, plain)
        self.replays[size]()
        hidden, tokens = self.outputs[size]
        if plain:
            return HostSamples.copy(Samples(tokens[:count]))
        return self.eager.sample(hidden[:count], batch)  # its tokens replace those of the graph in the future map

    def buffer(self, size: int) -> Tensor:
        """[fields, size], the head of the memory: so that one copy fills it. All sizes share it, since copies and replays
        run in the order in which they were enqueued."""
        return self.memory[: FIELDS * size].view(FIELDS, size)

    def fill(self, batch: Batch, size: int, plain: bool) -> None:
        """The batch into the static buffers, padding (table_idx -1, position 0) behind it up to `size`."""
        count, host = len(batch.reqs), np.zeros((FIELDS, size), np.int32)
        inputs = DecodeInputs(*host)
        inputs.input_ids[:count] = known_ids(batch)
        inputs.positions[:count] = batch.prefix_lens
        inputs.table_idx[:] = -1
        inputs.table_idx[:count] = batch.table_idx
        if plain:
            inputs.inv_temperature[:count] = inv_temperatures(batch.reqs).view(np.int32)
            inputs.key_low[:count], inputs.key_high[:count] = noise_keys(batch.reqs)
        self.buffer(size).copy_(pin(host, self.device), non_blocking=True)

    def captured_step(self, size: int) -> None:
        """One step of `size` decodes, from the static buffers to `outputs` and the future map."""
        inputs, eager = DecodeInputs(*self.buffer(size)), self.eager
        decodes = padded_decodes(eager.attention, inputs.table_idx, inputs.positions)
        ids = eager.futures.resolve(inputs.input_ids, inputs.table_idx)
        metadata = PagedMetadata(out_loc=None, decodes=decodes, chunks=None)
        hidden = eager.compute(ForwardBatch(ids, inputs.positions, last_indices=None, metadata=metadata))
        inv_temperature = inputs.inv_temperature.view(torch.float32)
        tokens = eager.sampler.draw(eager.model.head(hidden), inv_temperature, inputs.key_low, inputs.key_high)
        eager.futures.store(inputs.table_idx, tokens)
        self.outputs[size] = hidden, tokens
