"""CausalLM: Llama, Mistral, Qwen2 and Qwen3 in one file.

A step is a flat list of tokens. The model knows nothing of requests, padding, pages, graphs or ranks: whoever calls it
passes the positions, and one call-back that does attention and keeps the keys and values wherever it likes.
"""

import math
from types import ModuleType

import torch
from torch import Tensor, nn

from common.config import ModelConfig
from common.interfaces import Attention
from common.kernels import ops as plain_ops


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, ops: ModuleType):
        super().__init__()
        self.weight, self.eps, self.ops = nn.Parameter(torch.ones(size)), eps, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)"""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: ModuleType):
        super().__init__()
        self.layer, self.head_dim, self.eps, self.ops = layer, config.head_dim, config.rms_norm_eps, ops
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, self.eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps, ops) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        norms = (self.q_norm.weight, self.k_norm.weight) if self.q_norm is not None else (None, None)
        q, k, v = self.ops.qk_norm_rope(heads, self.num_heads, self.num_kv_heads, *norms, self.eps, cos, sin)
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, ops: ModuleType):
        super().__init__()
        self.ops = ops
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, ops: ModuleType):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = SelfAttention(config, index, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)


class CausalLM(nn.Module):
    """Module names are Hugging Face's, except for the fused qkv_proj and gate_up_proj.

    ops: who does the small operations, common.kernels.ops or a module with the same functions.
    """

    def __init__(self, config: ModelConfig, ops: ModuleType = plain_ops):
        super().__init__()
        self.config = config
        # without nn.Embedding's own random values, which on the meta device take seconds of imports
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, index, ops) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_tables: tuple[Tensor, Tensor] | None = None  # cos and sin, [max_position, 1, head_dim]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids [T], positions [T] -> hidden states [T, hidden_size], normalised, ready for `head`."""
        cos, sin = (table[positions] for table in self.rope_tables)  # [T, 1, D]
        x = self.embed_tokens(input_ids)
        h = self.layers[0].input_layernorm(x)
        for layer, next_norm in zip(
            self.layers, [*(n.input_layernorm for n in self.layers[1:]), self.norm], strict=True
        ):
            x, h = layer.post_attention_layernorm.add(x, layer.self_attn(h, cos, sin, attention))
            x, h = next_norm.add(x, layer.mlp(h))
        return h

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab_size] of the rows that are asked for: hidden [S, hidden_size]."""
        return self.lm_head(hidden)

    def tie_embeddings(self) -> None:
        """Let the head use the embedding's memory, where the model is made that way; called once that memory is allocated."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def init_rope(self, max_position: int, device: torch.device) -> None:
        """Tables for positions below max_position; called once the weights are in place."""
        weight = self.norm.weight
        angles = torch.outer(torch.arange(max_position, device=device).float(), _inv_freq(self.config).to(device))
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        self.rope_tables = tuple(table[:, None].to(weight.dtype) for table in tables)


def _inv_freq(config: ModelConfig) -> Tensor:
    """[head_dim / 2] in radians a position; Llama 3.1's stretching of the long wavelengths where it is asked for."""
    inv = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.llama3_rope is None:
        return inv
    factor, low, high, original = config.llama3_rope
    wavelength = 2 * math.pi / inv
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 0: stretch, 1: keep
    return inv * (smooth + (1 - smooth) / factor)
