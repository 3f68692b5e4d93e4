"""Which part of the model a rank has, and how the parts make the whole. Applied from outside: common/model.py has no word of it.

A rank's model is an ordinary CausalLM of a smaller configuration: fewer heads, a narrower MLP, a shorter vocabulary.
So attention, KV pool and kernels are as they were. Only where a sum over all heads, columns or words is due, a
module is wrapped by one that asks the other ranks (Shoeybi et al., 2019).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from common.checkpoint import (
    FUSED,
    Loaded,
    checkpoint_tensors,
    dummy_generator,
    empty_model,
    fill_random,
    finish_model,
    load,
    load_config,
    load_weights,
)
from common.config import EngineConfig, ModelConfig, UserError
from common.device import resolve_dtype
from common.kernels import select_kernels
from common.model import CausalLM
from stage8_tp.ranks import Alone, Ranks

VOCAB_MULTIPLE = 8  # words of a rank: rows of the head's weight, which matrix units like in eights


@dataclass(frozen=True)
class Shard:
    """The part of `whole` that rank `rank` of `world` has. Raises UserError if it can't be dealt to so many."""

    whole: ModelConfig
    rank: int
    world: int

    def __post_init__(self):
        if not divides(self.whole, self.world):
            c = self.whole
            sizes = [str(n) for n in range(1, c.num_heads + 1) if divides(c, n)]
            raise UserError(
                f"{c.num_heads} query heads, {c.num_kv_heads} KV heads and {c.intermediate_size} columns of the MLP "
                f"can't be dealt to {self.world} ranks; use --tp {' or '.join(sizes)}"
            )

    def share(self, size: int) -> range:
        """This rank's part of `size` things, as even as can be."""
        return range(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    @property
    def kv_heads(self) -> range:
        """Whole ones, each with its query heads; the same one on several ranks where there are fewer than ranks."""
        c = self.whole
        if self.world > c.num_kv_heads:
            return range(self.rank * c.num_kv_heads // self.world, self.rank * c.num_kv_heads // self.world + 1)
        return self.share(c.num_kv_heads)

    @property
    def heads(self) -> range:
        c = self.whole
        group, kv = c.num_heads // c.num_kv_heads, self.kv_heads
        return self.share(c.num_heads) if self.world > c.num_kv_heads else range(kv.start * group, kv.stop * group)

    @property
    def mlp(self) -> range:
        return self.share(self.whole.intermediate_size)

    @property
    def vocab(self) -> range:
        """Equally many on all ranks, for the gather; on the last ones they may go beyond the real words."""
        rows = -(-self.whole.vocab_size // (self.world * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE
        return range(self.rank * rows, (self.rank + 1) * rows)

    @property
    def config(self) -> ModelConfig:
        """Of this rank's model."""
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.mlp),
            vocab_size=len(self.vocab),
        )

    def span(self, projection: str) -> tuple[int, int, range] | None:
        """(dimension, size, part of it) of a weight, by its module's name in Hugging Face's layout; None: it is not dealt."""
        c, dim = self.whole, self.whole.head_dim
        queries, keys = (range(h.start * dim, h.stop * dim) for h in (self.heads, self.kv_heads))
        return {
            "q_proj": (0, c.num_heads * dim, queries),
            "k_proj": (0, c.num_kv_heads * dim, keys),
            "v_proj": (0, c.num_kv_heads * dim, keys),
            "o_proj": (1, c.num_heads * dim, queries),
            "gate_proj": (0, c.intermediate_size, self.mlp),
            "up_proj": (0, c.intermediate_size, self.mlp),
            "down_proj": (1, c.intermediate_size, self.mlp),
            "embed_tokens": (0, c.vocab_size, self.vocab),
            "lm_head": (0, c.vocab_size, self.vocab),
        }.get(projection)

    def take(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a weight; rows beyond the vocabulary are zeros.

        weight: a tensor, or what safetensors' get_slice returns, of which no more than the part is read.
        """
        shape = weight.shape if isinstance(weight, Tensor) else weight.get_shape()
        span = self.span(name.split(".")[-2]) if "." in name else None
        if span is None or span[0] >= len(shape):
            return weight[:]
        dim, size, part = span
        if shape[dim] != size:
            raise UserError(f"{name} has shape {list(shape)}, but config.json asks for {size} in dimension {dim}")
        first, last = min(part.start, size), min(part.stop, size)
        taken = weight[first:last] if dim == 0 else weight[:, first:last]
        return F.pad(taken, (0, 0, 0, len(part) - (last - first))) if last - first < len(part) else taken

    def read(self, file: safe_open, name: str) -> Tensor:
        """`take`, out of an open file."""
        return self.take(name, file.get_slice(name))


def divides(config: ModelConfig, world: int) -> bool:
    """Can a model be dealt to so many ranks?"""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    whole_heads = world <= kv_heads or (world % kv_heads == 0 and heads % world == 0)
    return whole_heads and config.intermediate_size % world == 0


def load_shard(config: EngineConfig, ranks: Ranks | Alone) -> tuple[ModelConfig, Loaded]:
    """common.checkpoint.load for a rank: the whole model's configuration, and this rank's part of it. Raises UserError."""
    if ranks.world == 1:
        loaded = load(config)
        return loaded.model.config, loaded
    whole, folder = load_config(config.model)
    shard = Shard(whole, ranks.rank, ranks.world)
    if ranks.staged:
        if config.graph:
            raise UserError("a CUDA graph can't record what ranks that share a GPU say to each other; use --no-graph")
        config = replace(config, graph=False)
    device, dtype = ranks.device, resolve_dtype(config.dtype, ranks.device)
    kernels = select_kernels(config.attn, device, dtype, whole.head_dim)
    config = config.resolve(device.type, whole.max_position)
    model = empty_model(shard.config, device, dtype, kernels.ops)
    if folder is None:
        tensors = ((name, shard.take(name, tensor)) for name, tensor in dummy_tensors(whole, device, dtype))
    else:
        tensors = checkpoint_tensors(folder, device, shard.read)
    load_weights(model, tensors)
    shard_model(model, shard, ranks)
    return whole, Loaded(config, finish_model(model, config.max_model_len), kernels, device, dtype)


def dummy_tensors(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one at a time: the numbers that fill_dummy gives to the whole model, under Hugging Face's names."""
    q, kv, mlp = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp}
    generator = dummy_generator(device)
    for name, shape in empty_model(config, torch.device("meta"), dtype).named_parameters():
        weight = fill_random(torch.empty(shape.shape, dtype=shape.dtype, device=device), generator)
        *path, module, kind = name.split(".")
        parts = [ours for ours, fused in FUSED.items() if fused == module]
        pieces = weight.split([sizes[part] for part in parts]) if parts else [weight]
        for part, piece in zip(parts or [module], pieces, strict=True):
            yield ".".join((*path, part, kind)), piece


def shard_model(model: CausalLM, shard: Shard, ranks: Ranks | Alone) -> None:
    """Make a model of shard.config, its weights in place, a part of the whole: 2 all-reduces a layer, 1 for the embedding."""
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallel(layer.mlp.down_proj, ranks)
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, shard.vocab.start, ranks)
    model.lm_head = VocabParallelHead(model.lm_head, shard.whole.vocab_size, ranks)


class RowParallel(nn.Module):
    """x [T, part of in] -> [T, out]: every rank multiplies its own columns of the weight, and the products add up.

    The input is parted because the projection before it (qkv, gate_up) was by its rows, which takes no message at all.
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks | Alone):
        super().__init__()
        self.linear, self.ranks = linear, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce(self.linear(x))


class VocabParallelEmbedding(nn.Module):
    """ids [T] -> [T, hidden_size]: one rank has a word's row, the others add zeros."""

    def __init__(self, embedding: nn.Embedding, first: int, ranks: Ranks | Alone):
        super().__init__()
        self.embedding, self.first, self.ranks = embedding, first, ranks

    def forward(self, ids: Tensor) -> Tensor:
        row = ids - self.first
        elsewhere = (row < 0) | (row >= self.embedding.num_embeddings)
        rows = self.embedding(row.masked_fill_(elsewhere, 0))
        return self.ranks.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


class VocabParallelHead(nn.Module):
    """hidden [S, hidden_size] -> logits [S, vocab_size] on every rank, each of which has computed those of its words."""

    def __init__(self, linear: nn.Linear, vocab_size: int, ranks: Ranks | Alone):
        super().__init__()
        self.linear, self.vocab_size, self.ranks = linear, vocab_size, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.ranks.all_gather(self.linear(hidden))  # [world, S, words of a rank]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
