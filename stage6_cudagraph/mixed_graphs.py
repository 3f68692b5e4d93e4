"""Steps with prompts, recorded at padded numbers of positions: decodes first, then chunks, then padding.

A step with a short prompt takes the host far longer to launch than the device to compute, and everybody who decodes in
the same step waits with it. What follows the last layer depends on who is to be sampled, and stays eager.
"""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from common.device import pin
from stage2_req.req import Batch
from stage2_req.runner import ModelRunner
from stage6_cudagraph.attention import StaticMixed
from stage6_cudagraph.recorder import Recorder

CHUNKS = 32  # room for so many in a recorded step
FEW = 16  # decodes; with room for no more than that, long ones are split over more of the device


def token_sizes(max_tokens: int) -> list[int]:
    """Powers of two while reading the weights takes most of the time, four to the octave where arithmetic does."""
    sizes, size = [], 16
    while size < max_tokens:
        sizes.append(size)
        size += size if size < 256 else 2 ** (size.bit_length() - 3)
    return [*sizes, max_tokens] if max_tokens else []


class MixedGraphs:
    def __init__(self, eager: ModelRunner, recorder: Recorder, max_batch: int, max_tokens: int):
        self.model, self.attention, self.device = eager.model, StaticMixed(eager.attention), eager.device
        self.max_tokens, self.sizes = max_tokens, token_sizes(max_tokens)
        self.rooms = sorted({min(FEW, max_batch), max_batch})  # for decodes
        self.ids = torch.zeros(max_tokens, dtype=torch.int64, device=self.device)
        self.numbers = torch.zeros(sum(widths(max_tokens, max_batch)), dtype=torch.int32, device=self.device)
        self.hidden: dict[tuple[int, int], Tensor] = {}  # shape -> [positions, hidden size]
        shapes = {(size, min(room, size)) for size in self.sizes for room in self.rooms}
        self.replays = recorder.record("steps with prompts", self.step, shapes)

    def fit(self, batch: Batch) -> bool:
        chunks = len(batch.reqs) - batch.num_decode
        return batch.num_tokens <= self.max_tokens and batch.num_decode <= self.rooms[-1] and chunks <= CHUNKS

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, V]."""
        size = self.sizes[bisect_left(self.sizes, batch.num_tokens)]
        shape = size, min(self.rooms[bisect_left(self.rooms, batch.num_decode)], size)
        self.fill(batch, shape)
        self.replays[shape]()
        last_index = self.buffers(shape)[-1]
        return self.model.head(self.hidden[shape][last_index[: len(batch.sampled)]])

    def buffers(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """The numbers of a step, one behind the other at the head of the memory, so that one copy fills them."""
        fields = widths(*shape)
        return self.numbers[: sum(fields)].split(fields)

    def fill(self, batch: Batch, shape: tuple[int, int]) -> None:
        """The batch into the static buffers, padding behind it."""
        tokens, decodes = batch.num_tokens, batch.num_decode
        chunks, fields = len(batch.reqs) - decodes, widths(*shape)
        host = np.zeros(sum(fields), np.int32)
        positions, rows, lens, chunk_rows, cu_q, cu_k, last_index = np.split(host, np.cumsum(fields)[:-1])
        positions[:tokens] = batch.token_positions()
        rows[:] = -1
        rows[:tokens] = np.repeat(batch.rows, batch.lens)
        lens[:decodes] = batch.ends[:decodes]
        # sequences of the prefill kernel: the decodes, as one without keys, the chunks, empty ones, and the padding, which
        # has no keys either (in no sequence at all it would keep what the memory held)
        chunk_rows[1 : chunks + 1] = batch.rows[decodes:]
        cu_q[1:] = tokens
        cu_q[1 : chunks + 2] = decodes + np.cumsum([0, *batch.lens[decodes:]])
        cu_q[-1] = shape[0]
        cu_k[1:] = batch.ends[decodes:].sum()
        cu_k[1 : chunks + 2] = np.cumsum([0, *batch.ends[decodes:]])
        last_index[: len(batch.sampled)] = batch.last_tokens()
        self.numbers[: len(host)].copy_(pin(host, self.device), non_blocking=True)
        self.ids[:tokens] = batch.input_ids

    def step(self, shape: tuple[int, int]) -> None:
        """What is recorded: all layers over `shape[0]` positions, up to `shape[1]` of them decodes."""
        positions, *numbers, _ = self.buffers(shape)
        self.attention.plan(positions, *numbers)
        self.hidden[shape] = self.model(self.ids[: shape[0]], positions, self.attention)


def widths(tokens: int, decodes: int) -> tuple[int, ...]:
    """How many numbers a step has of each kind: those of StaticMixed.plan, and where the tokens to be sampled are."""
    return tokens, tokens, decodes, CHUNKS + 2, CHUNKS + 3, CHUNKS + 3, decodes + CHUNKS
