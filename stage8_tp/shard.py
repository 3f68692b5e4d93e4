"""Which part of the model a rank has, and how the parts make the whole. Applied from outside: common/model.py does not know of it.

A rank's model is an ordinary CausalLM of a smaller configuration: fewer heads, a narrower MLP, a shorter vocabulary.
So attention, KV pool and kernels are as they were. Only where a sum over all heads, columns or tokens is due, a
module is wrapped by one that asks the other ranks (Shoeybi et al., 2019).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import ModelConfig, UserError
from common.model import CausalLM
from stage8_tp.ranks import Alone, Ranks

VOCAB_MULTIPLE = 8  # a rank's tokens are rows of the head's weight, which matrix units like in eights


@dataclass(frozen=True)
class Shard:
    """The part of `whole` that rank `rank` of `world` has. Raises UserError if it can't be divided among so many."""

    whole: ModelConfig
    rank: int
    world: int

    def __post_init__(self):
        if not divides(self.whole, self.world):
            c = self.whole
            sizes = [str(n) for n in range(1, c.num_heads + 1) if divides(c, n)]
            raise UserError(
                f"{c.num_heads} query heads, {c.num_kv_heads} KV heads and {c.intermediate_size} columns of the MLP "
                f"can't be divided among {self.world} ranks; use --tp {' or '.join(sizes)}"
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
        """Equally many tokens on all ranks, for the gather; the last ones may go beyond the vocabulary."""
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
        """(dimension, size, part of it) of a weight, by its module's name in Hugging Face's layout; None: it is not divided."""
        c, dim = self.whole, self.whole.head_dim
        queries, keys = (range(h.start * dim, h.stop * dim) for h in (self.heads, self.kv_heads))
        mine = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": self.mlp, "up_proj": self.mlp}
        sizes = c.fused["qkv_proj"] | c.fused["gate_up_proj"]
        spans = {name: (0, sizes[name], part) for name, part in mine.items()}
        spans |= dict.fromkeys(("embed_tokens", "lm_head"), (0, c.vocab_size, self.vocab))
        # by columns, since their input is what the rank's own projections before them have put out
        spans |= {"o_proj": (1, sizes["q_proj"], queries), "down_proj": (1, sizes["gate_proj"], self.mlp)}
        return spans.get(projection)

    def take(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a weight; rows beyond the vocabulary are zeros.

        weight: a tensor, or what safetensors' get_slice returns, of which no more than the part is read.
        """
        shape = weight.shape if isinstance(weight, Tensor) else weight.get_shape()
        span = self.span(name.split(".")[-2]) if "." in name else None
        if span is None:
            return weight[...]
        if span[0] >= len(shape):  # the bias of a projection whose results are added up over the ranks: one has it
            return weight[...] if self.rank == 0 else torch.zeros(shape)
        dim, size, part = span
        if shape[dim] != size:
            raise UserError(f"{name} has shape {list(shape)}, but config.json asks for {size} in dimension {dim}")
        first, last = min(part.start, size), min(part.stop, size)
        taken = weight[first:last] if dim == 0 else weight[:, first:last]
        return F.pad(taken, (0, 0, 0, len(part) - (last - first))) if last - first < len(part) else taken


def divides(config: ModelConfig, world: int) -> bool:
    """Can a model be divided among so many ranks?"""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    whole_heads = world <= kv_heads or (world % kv_heads == 0 and heads % world == 0)
    return whole_heads and config.intermediate_size % world == 0


class RankPart:
    """What a rank loads (see common.checkpoint.Part)."""

    def __init__(self, ranks: Ranks | Alone, whole: ModelConfig):
        self.shard, self.ranks = Shard(whole, ranks.rank, ranks.world), ranks
        self.config, self.take = self.shard.config, self.shard.take

    def attach(self, model: CausalLM) -> None:
        shard_model(model, self.shard, self.ranks)


def shard_model(model: CausalLM, shard: Shard, ranks: Ranks | Alone) -> None:
    """Make a model of shard.config, its weights in place, a part of the whole: 2 all-reduces a layer, 1 for the embedding."""
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallel(layer.mlp.down_proj, ranks)
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, shard.vocab.start, ranks)
    model.lm_head = VocabParallelHead(model.lm_head, shard.whole.vocab_size, ranks)


class RowParallel(nn.Module):
    """x [T, part of in] -> [T, out]: every rank multiplies its own columns of the weight, and the products add up.

    The input is divided because the projection before it (qkv, gate_up) was, by its rows, which needs no communication.
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks | Alone):
        super().__init__()
        self.linear, self.ranks = linear, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce(self.linear(x))


class VocabParallelEmbedding(nn.Module):
    """ids [T] -> [T, hidden_size]: one rank has a token's row, the others add zeros."""

    def __init__(self, embedding: nn.Embedding, first: int, ranks: Ranks | Alone):
        super().__init__()
        self.embedding, self.first, self.ranks = embedding, first, ranks

    def forward(self, ids: Tensor) -> Tensor:
        row = ids - self.first
        elsewhere = (row < 0) | (row >= self.embedding.num_embeddings)
        rows = self.embedding(row.masked_fill_(elsewhere, 0))
        return self.ranks.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


class VocabParallelHead(nn.Module):
    """hidden [S, hidden_size] -> logits [S, vocab_size] on every rank, each of which has computed those of its tokens."""

    def __init__(self, linear: nn.Linear, vocab_size: int, ranks: Ranks | Alone):
        super().__init__()
        self.linear, self.vocab_size, self.ranks = linear, vocab_size, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.ranks.all_gather(self.linear(hidden))  # [world, S, tokens of a rank]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
