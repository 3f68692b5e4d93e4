"""Decode steps as CUDA graphs: hundreds of kernel launches recorded once, then replayed by a single call.

A graph repeats the same kernels on the same addresses. So its inputs live in static buffers, and a batch is padded up
to the next size that was recorded. Prefill has too many shapes for that and stays eager; its kernels are long anyway.
"""

import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from common.config import UserError
from stage2_req.req import Batch
from stage2_req.runner import ModelRunner
from stage6_cudagraph.attention import StaticDecode


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then multiples of 8: dense where a padded row would be a large share of the step."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


class GraphRunner:
    """Replays a graph where a step is all decode and small enough; hands everything else to the eager runner.

    Without a GPU the recorded function is called instead: same buffers, same padding, no speed.
    """

    def __init__(self, eager: ModelRunner, attention: StaticDecode, max_batch: int):
        self.eager, self.model, self.attention = eager, eager.model, attention
        self.device, self.sizes = attention.device, graph_sizes(max_batch)
        self.input_ids = torch.zeros(max_batch, dtype=torch.int64, device=self.device)
        self.logits: dict[int, Tensor] = {}  # size -> [size, V]
        self.num_replays = 0
        self.memory = 0  # bytes that recording took
        self.graphs = self.capture_all()

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V]; of a replay they stay valid until the next one."""
        count = len(batch.reqs)
        if count > self.sizes[-1] or batch.num_decode < count or len(batch.sampled) < count:
            return self.eager.run(batch)
        size = self.sizes[bisect_left(self.sizes, count)]
        self.attention.fill(batch, size)
        self.input_ids[:count] = batch.input_ids
        self.graphs[size]()
        self.num_replays += 1
        return self.logits[size][:count]

    def step(self, size: int) -> None:
        """What is recorded: one decode step of `size` rows, from static buffers to static buffers."""
        self.attention.plan(size)
        hidden = self.model(self.input_ids[:size], self.attention.positions, self.attention)
        self.logits[size] = self.model.head(hidden)

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
        tqdm.write(f"{len(graphs)} graphs, {time.perf_counter() - start:.1f} s, {self.memory / 2**30:.2f} GiB")
        return graphs
