"""Captures functions as CUDA graphs: hundreds of kernel launches captured once, then replayed by a single call."""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from tqdm import tqdm

from common.config import UserError

Size = TypeVar("Size")


class Capturer:
    """All graphs share their scratch memory, for they run one after the other; a tensor that is still referenced keeps
    its own.

    Without a GPU, a replay calls the function: same buffers, same padding, no speed.
    """

    def __init__(self, device: torch.device):
        self.device, self.count = device, 0
        if device.type == "cuda":
            self.start, self.free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
            self.pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, what: str, step: Callable[[Size], None], sizes: Iterable[Size]) -> dict[Size, Callable[[], None]]:
        """size -> what replays step(size). Raises UserError when the memory is used up."""
        if self.device.type != "cuda":
            return {size: partial(step, size) for size in sizes}
        graphs, sizes = {}, sorted(sizes, reverse=True)  # the scratch memory of the largest is enough for the others
        try:
            for size in tqdm(sizes, desc=f"CUDA graphs of {what}", unit="graph", disable=not sizes):
                step(size)  # kernels are compiled and libraries set up: neither can be captured
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    step(size)
                graphs[size] = graph.replay
        except torch.OutOfMemoryError as error:
            left = torch.cuda.mem_get_info(self.device)[0] / 2**30
            raise UserError(
                f"out of memory while capturing the CUDA graphs of {what}, {left:.2f} GiB are free; "
                "lower --graph-max-batch, --graph-max-tokens or --memory-fraction"
            ) from error
        self.count += len(graphs)
        return graphs

    def report(self) -> None:
        """On stderr: how many graphs there are, how long they took, and how much memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            memory = self.free - torch.cuda.mem_get_info(self.device)[0]
            took = f"{time.perf_counter() - self.start:.1f} s, {memory / 2**30:.2f} GiB"
            print(f"{self.count} CUDA graphs: {took}", file=sys.stderr)
