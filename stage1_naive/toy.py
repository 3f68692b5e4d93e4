"""The article's experiment, under its names: a two-layer toy that generates with and without a cache, timed and counted in
FLOPs.

Two layers of attention, hidden size 4096, 32 heads, a vocabulary of 100, random weights. FLOPs (a multiplication and an addition
count as two) are counted by PyTorch from the shapes of every matrix product, so they are exact, and free: on the
`meta` device nothing is computed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, HEADS, VOCAB, LAYERS = 4096, 32, 100, 2


class DemoAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, HIDDEN], past K and V [2, HEADS, P, HEAD_DIM] -> (output [T, HIDDEN], K and V of P + T positions)"""
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)  # each [HEADS, T, HEAD_DIM]
        kv = torch.stack((k, v))
        if past is not None:
            kv = torch.cat((past, kv), 2)
        mixed = F.scaled_dot_product_attention(q[None], kv[0][None], kv[1][None], is_causal=past is None)[0]
        return self.out(mixed.transpose(0, 1).flatten(1)), kv


class DemoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(DemoAttn() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, cache: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """ids [T] -> (logits [T, VOCAB], the new cache)"""
        x, new = self.embed(ids), []
        for index, layer in enumerate(self.layers):
            x, kv = layer(x, cache[index] if cache else None)
            new.append(kv)
        return self.head(x), new


@torch.inference_mode()
def generate_naive(model: DemoGPT, prompt: Tensor, new_tokens: int) -> Tensor:
    """Greedy: prompt [P] -> [P + new_tokens]. Every token runs all that is before it."""
    ids = prompt
    for _ in range(new_tokens):
        logits, _ = model(ids, None)
        ids = torch.cat((ids, logits[-1:].argmax(-1)))
    return ids


@torch.inference_mode()
def generate_cached(model: DemoGPT, prompt: Tensor, new_tokens: int) -> Tensor:
    """The same tokens. After the prompt, every token runs alone."""
    ids, cache = prompt, None
    for _ in range(new_tokens):
        logits, cache = model(ids[-1:] if cache else ids, cache)
        ids = torch.cat((ids, logits[-1:].argmax(-1)))
    return ids


@dataclass(frozen=True)
class Flops:
    projections: int  # weights times activations
    attention: int  # Q times K, and its softmax times V

    @property
    def total(self) -> int:
        return self.projections + self.attention


def count_step(new: int, past: int) -> Flops:
    """FLOPs of one pass over `new` tokens with `past` of them cached."""
    with torch.device("meta"):
        model, ids = DemoGPT(), torch.zeros(new, dtype=torch.long)
        cache = [torch.zeros(2, HEADS, past, HIDDEN // HEADS) for _ in range(LAYERS)] if past else None
        with FlopCounterMode(display=False) as counter:
            model(ids, cache)
    by_kind = counter.get_flop_counts()["Global"]
    projections = by_kind[torch.ops.aten.mm]
    return Flops(projections, sum(by_kind.values()) - projections)


def closed_form(new: int, past: int) -> Flops:
    """The same on paper: (m x p) times (p x n) takes 2 m n p. SDPA computes all new x (past + new) scores, then masks."""
    return Flops(
        projections=2 * new * HIDDEN * (LAYERS * 4 * HIDDEN + VOCAB),
        attention=LAYERS * 2 * 2 * new * (past + new) * HIDDEN,
    )


def count_generation(prompt_len: int, new_tokens: int, cached: bool) -> Flops:
    """FLOPs of a whole generation, by the closed form (a test holds it against the counter)."""
    lengths = range(prompt_len + 1, prompt_len + new_tokens)  # of the text after the first new token, the second, …
    steps = [closed_form(prompt_len, 0), *(closed_form(1, n - 1) if cached else closed_form(n, 0) for n in lengths)]
    return Flops(sum(s.projections for s in steps), sum(s.attention for s in steps))
