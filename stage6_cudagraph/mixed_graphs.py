"""Steps with prompts, captured at padded numbers of tokens: decodes first, then chunks, then padding.

A step with a short prompt takes the host far longer to launch than the device to compute, and all that decode in the
same step wait with it.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Annotated, get_type_hints

import numpy as np
import torch
from torch import Tensor

from stage2_req.prompt_logprobs import spans
from stage2_req.req import Batch, ForwardBatch, Samples, pin
from stage2_req.runner import ModelRunner
from stage2_req.sampling import inv_temperatures, noise_keys
from stage4_batch.attention import Chunks, Decodes, PagedMetadata
from stage6_cudagraph.attention import MixedAttention, padding_page
from stage6_cudagraph.capture import Capturer
from stage6_cudagraph.overlap import FutureRunner, HostSamples, known_ids

# What a captured step has room for at least. More costs time in every step: few decodes can each be split over more of the
# device, and every chunk that is not there still has its programs and its row of logits.
FEW_DECODES, FEW_CHUNKS = 16, 32
Array = Tensor | np.ndarray


@dataclass(eq=False)
class MixedInputs:
    """All that the host knows of a step: int32 arrays, one behind the other, filled on the host and uploaded as one piece.

    The sequences of the prefill kernel are the decodes together, which have no keys there, the chunks, empty ones for the
    rest of the room, and the padding, which has no keys either (in no sequence at all it would keep what the memory held).
    With 2 decodes, chunks of 3 and 4 tokens and room for 16 the queries end at 2, 5, 9, 9, …, 9, 16.
    """

    input_ids: Annotated[Array, "tokens"]  # UNSEEN only among the decodes
    positions: Annotated[Array, "tokens"]
    out_loc: Annotated[Array, "tokens"]  # slots
    decode_table_idx: Annotated[Array, "decodes"]
    cache_seqlens: Annotated[Array, "decodes"]  # the new token included; 0: no decode
    chunk_table_idx: Annotated[Array, "sequences"]
    cu_seqlens_q: Annotated[Array, "bounds"]
    cu_seqlens_k: Annotated[Array, "bounds"]
    last_indices: Annotated[Array, "samples"]  # tokens whose logits are sampled
    sample_table_idx: Annotated[Array, "samples"]  # -1: padding
    inv_temperature: Annotated[Array, "samples"]  # the bits of a float32
    key_low: Annotated[Array, "samples"]
    key_high: Annotated[Array, "samples"]

    @classmethod
    def carve(cls, memory: Array, sizes: list[int]) -> "MixedInputs":
        """The arrays at the head of a piece of memory, each as long as `sizes` says."""
        return cls(*(memory[a:b] for a, b in pairwise(accumulate(sizes, initial=0))))

    def fill(self, batch: Batch, slots: np.ndarray, padding_slot: int) -> None:
        """On the host: the batch, whose tokens go to `slots` [T], into arrays of zeros."""
        tokens, d, samples = batch.num_tokens, batch.num_decodes, len(batch.sampled)
        c = len(batch.reqs) - d  # chunks
        self.input_ids[:tokens] = known_ids(batch)
        self.positions[:tokens] = batch.positions()
        self.out_loc[:tokens], self.out_loc[tokens:] = slots, padding_slot
        self.decode_table_idx[:d] = batch.table_idx[:d]
        self.cache_seqlens[:d] = batch.seq_lens[:d]
        self.chunk_table_idx[1 : c + 1] = batch.table_idx[d:]
        self.cu_seqlens_q[1 : c + 2] = d + np.cumsum([0, *batch.extend_lens[d:]])
        self.cu_seqlens_q[c + 2 : -1], self.cu_seqlens_q[-1] = tokens, len(self.input_ids)
        self.cu_seqlens_k[1 : c + 2] = np.cumsum([0, *batch.seq_lens[d:]])
        self.cu_seqlens_k[c + 2 :] = batch.seq_lens[d:].sum()
        self.last_indices[:samples] = batch.last_indices()
        self.sample_table_idx[:samples], self.sample_table_idx[samples:] = batch.table_idx[batch.sample_mask], -1
        self.inv_temperature[:samples] = inv_temperatures(batch.sampled).view(np.int32)
        self.key_low[:samples], self.key_high[:samples] = noise_keys(batch.sampled)


@dataclass(frozen=True, order=True)
class Shape:
    """What a captured step has room for."""

    tokens: int
    decodes: int
    chunks: int


@cache
def array_sizes(shape: Shape) -> list[int]:
    """Lengths of the arrays of MixedInputs."""
    sequences, samples = shape.chunks + 2, shape.decodes + shape.chunks
    lengths = {"tokens": shape.tokens, "decodes": shape.decodes, "samples": samples}
    lengths |= {"sequences": sequences, "bounds": sequences + 1}
    arrays = get_type_hints(MixedInputs, include_extras=True).values()
    return [lengths[array.__metadata__[0]] for array in arrays]


def token_sizes(max_tokens: int) -> list[int]:
    """Powers of two while reading the weights takes most of the time, four to the octave where arithmetic does."""
    sizes, size = [], 16
    while size < max_tokens:
        sizes.append(size)
        size += size if size < 256 else 2 ** (size.bit_length() - 3)
    return [*sizes, max_tokens] if max_tokens else []


class MixedGraphs:
    def __init__(self, eager: FutureRunner, capturer: Capturer, max_batch: int, max_tokens: int):
        paged, page_table = eager.attention, eager.attention.page_table
        attention = MixedAttention(paged.kernels, paged.pool, page_table)
        self.eager, self.device, self.page_table, self.max_batch = eager, eager.device, page_table, max_batch
        self.runner = ModelRunner(eager.model, attention, eager.sampler)
        self.padding_slot = padding_page(paged) * page_table.page_size
        self.max_len = page_table.host.shape[1] * page_table.page_size
        self.sizes = token_sizes(max_tokens if paged.kernels.captures_varlen else 0)
        self.rooms = ((FEW_DECODES, FEW_CHUNKS), (max_batch, FEW_CHUNKS), (max_batch, len(page_table.host)))
        shapes = {self.shape(size, *room) for size in self.sizes for room in self.rooms}
        largest = max((sum(array_sizes(shape)) for shape in shapes), default=0)
        self.memory = torch.zeros(largest, dtype=torch.int32, device=self.device)
        self.outputs: dict[Shape, tuple[Tensor, Tensor]] = {}  # hidden states [S, hidden_size], tokens [S]
        self.replays = capturer.capture("steps with prompts", self.captured_step, shapes)

    def fit(self, batch: Batch) -> bool:
        tokens_fit = bool(self.sizes) and batch.num_tokens <= self.sizes[-1]
        return tokens_fit and not spans(batch) and batch.num_decodes <= self.max_batch

    def shape(self, tokens: int, decodes: int, chunks: int) -> Shape:
        """Room for so many, as far as there can be so many: a chunk has two tokens at least."""
        return Shape(tokens, min(decodes, tokens, self.max_batch), min(chunks, tokens // 2, len(self.page_table.host)))

    def shape_for(self, batch: Batch) -> Shape:
        """The smallest that was captured."""
        size, d = self.sizes[bisect_left(self.sizes, batch.num_tokens)], batch.num_decodes
        c = len(batch.reqs) - d
        return self.shape(size, *next(room for room in self.rooms if d <= room[0] and c <= room[1]))

    def forward(self, batch: Batch) -> HostSamples:
        shape = self.shape_for(batch)
        host = np.zeros(sum(array_sizes(shape)), np.int32)
        slots = self.page_table.slots(np.repeat(batch.table_idx, batch.extend_lens), batch.positions())
        MixedInputs.carve(host, array_sizes(shape)).fill(batch, slots, self.padding_slot)
        self.memory[: len(host)].copy_(pin(host, self.device), non_blocking=True)
        self.replays[shape]()
        hidden, tokens = (output[: len(batch.sampled)] for output in self.outputs[shape])
        if all(req.params.plain for req in batch.sampled):
            return HostSamples.copy(Samples(tokens))
        return self.eager.sample(hidden, batch)

    def captured_step(self, shape: Shape) -> None:
        """A step of `shape`, from the static buffers to `outputs` and the future map."""
        inputs, eager, table = MixedInputs.carve(self.memory, array_sizes(shape)), self.eager, self.page_table.device
        lens, bounds = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), (shape.tokens, self.max_len)
        metadata = PagedMetadata(
            out_loc=inputs.out_loc.long(),
            decodes=Decodes(inputs.cache_seqlens, table[inputs.decode_table_idx]),
            chunks=Chunks(*lens, *bounds, table[inputs.chunk_table_idx]),
        )
        ids = inputs.input_ids.long()
        ids[: shape.decodes] = eager.futures.resolve(ids[: shape.decodes], inputs.decode_table_idx)
        hidden = self.runner.compute(ForwardBatch(ids, inputs.positions, inputs.last_indices, metadata))
        inv_temperature = inputs.inv_temperature.view(torch.float32)
        tokens = eager.sampler.draw(eager.model.head(hidden), inv_temperature, inputs.key_low, inputs.key_high)
        eager.futures.store(inputs.sample_table_idx, tokens)
        self.outputs[shape] = hidden, tokens
