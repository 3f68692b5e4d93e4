"""Decode steps as CUDA graphs: hundreds of kernel launches recorded once, then replayed by a single call.

A graph repeats the same kernels on the same addresses. So its inputs live in static buffers, and a batch is padded up
to the next size that was recorded. Prefill has too many shapes for that and stays eager; its kernels are long anyway.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.config import UserError
from common.device import pin
from stage2_req.req import Batch, Req
from stage2_req.runner import ModelRunner
from stage2_req.sampling import Sampler, Samples, draw_numbers
from stage6_cudagraph.attention import StaticDecode


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then multiples of 8: dense where a padded row would be a large share of the step."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


class GraphRunner:
    """Replays a graph where a step is all decode and small enough; hands everything else to the eager runner.

    The recorded step ends with a draw from its own logits. `GraphSampler` takes those tokens where the requests ask for
    no more than that, and then nothing lies between a step and the next but one upload (and one of new pages, where
    there are any).

    Without a GPU the recorded function is called instead: same buffers, same padding, no speed.
    """

    def __init__(self, eager: ModelRunner, attention: StaticDecode, sampler: Sampler, max_batch: int):
        self.eager, self.model, self.attention, self.sampler = eager, eager.model, attention, sampler
        self.device, self.sizes = eager.device, graph_sizes(max_batch)
        self.ids = torch.zeros(max_batch, dtype=torch.int64, device=self.device)  # newest tokens in, next tokens out
        self.numbers = torch.zeros(5 * max_batch, dtype=torch.int32, device=self.device)
        self.logits: dict[int, Tensor] = {}  # size -> [size, V]
        self.drawn: Tensor | None = None  # the last logits, if self.ids holds the draws from them
        self.num_replays = 0
        self.memory = 0  # bytes that recording took
        self.graphs = self.capture_all()

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V]; of a replay they stay valid until the next one."""
        count = len(batch.reqs)
        if count > self.sizes[-1] or batch.num_decode < count or len(batch.sampled) < count:
            return self.eager.run(batch)
        size = self.sizes[bisect_left(self.sizes, count)]
        simple = all(req.params.simple for req in batch.reqs)
        self.fill(batch, size, simple)
        self.graphs[size]()
        self.num_replays += 1
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
        """What is recorded: one decode step of `size` rows, from static buffers to static buffers."""
        positions, rows, *numbers = self.buffers(size)
        self.attention.plan(positions, rows)
        hidden = self.model(self.ids[:size], positions, self.attention)
        self.logits[size] = self.model.head(hidden)
        self.ids[:size] = self.sampler.draw_raw(self.logits[size], numbers)

    @torch.inference_mode()
    def capture_all(self) -> dict[int, Callable[[], None]]:
        if self.device.type != "cuda":
            return {size: lambda size=size: self.step(size) for size in self.sizes}
        start, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        graphs, pool = {}, torch.cuda.graph_pool_handle()
        try:
            for size in tqdm(self.sizes[::-1], desc="recording CUDA graphs", unit="graph"):
                self.step(size)  # compile kernels and fill allocators first: neither can be recorded
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.step(size)
                graphs[size] = graph.replay
        except torch.OutOfMemoryError as error:
            left = torch.cuda.mem_get_info(self.device)[0] / 2**30
            raise UserError(
                f"out of memory while recording the graph for {size} requests, {left:.2f} GiB are free; "
                "lower --graph-max-batch or --memory-fraction"
            ) from error
        torch.cuda.synchronize(self.device)
        self.memory = free - torch.cuda.mem_get_info(self.device)[0]
        took = f"{time.perf_counter() - start:.1f} s, {self.memory / 2**30:.2f} GiB"
        print(f"{len(graphs)} CUDA graphs: {took}", file=sys.stderr)
        return graphs


class GraphSampler:
    """Stage 2's sampler, less the work that the last replay has done already."""

    def __init__(self, runner: GraphRunner):
        self.runner = runner

    def __call__(self, logits: Tensor, reqs: list[Req]) -> Samples:
        """logits [S, V] -> one token for each of S requests; those of a replay stay valid until the next one."""
        if logits is self.runner.drawn:
            return Samples(self.runner.ids[: len(reqs)])
        return self.runner.sampler(logits, reqs)
