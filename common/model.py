"""CausalLM: Llama, Mistral, Qwen2 and Qwen3 in one file.

A step is a flat list of tokens. The model knows nothing of requests, padding, pages, graphs or ranks: the caller
passes the positions, and one call-back that does attention and keeps the keys and values wherever it likes.
"""

import math
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from common.config import ModelConfig
from common.kernels import ops as plain_ops


class AttentionCallback(Protocol):
    """The call-back: attention of the step's tokens over all that they may see."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> [T, Hq, D]"""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, ops: ModuleType):
        super().__init__()
        self.weight, self.eps, self.ops = nn.Parameter(torch.ones(size)), eps, ops

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); without a residual (norm of x, x)."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        residual, x = self.ops.add_rms_norm(residual, x, self.weight, self.eps)
        return x, residual


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: ModuleType):
        super().__init__()
        self.layer, self.head_dim, self.eps, self.ops = layer, config.head_dim, config.rms_norm_eps, ops
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        size = sum(config.fused["qkv_proj"].values())
        self.qkv_proj = nn.Linear(config.hidden_size, size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, self.eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps, ops) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionCallback) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        norms = (self.q_norm.weight, self.k_norm.weight) if self.q_norm is not None else (None, None)
        q, k, v = self.ops.qk_norm_rope(heads, self.num_heads, self.num_kv_heads, *norms, self.eps, cos, sin)
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, ops: ModuleType):
        super().__init__()
        self.ops = ops
        size = sum(config.fused["gate_up_proj"].values())
        self.gate_up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, ops: ModuleType):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = SelfAttention(config, index, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attention: AttentionCallback
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden_size]: what the layer before adds to residual [T, hidden_size]. Returns the same for the next one:
        the addition is left to its norm, so that both are one pass over memory."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos, sin, attention)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class CausalLM(nn.Module):
    """Module names are Hugging Face's, except for the fused qkv_proj and gate_up_proj.

    ops: the module of the small operations, common.kernels.ops or one with the same functions.
    """

    def __init__(self, config: ModelConfig, ops: ModuleType = plain_ops):
        super().__init__()
        self.config = config
        # without nn.Embedding's own random values, which on the meta device take seconds of imports
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config, index, ops) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_tables: tuple[Tensor, Tensor] | None = None  # cos and sin, [max_position, 1, head_dim]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback) -> Tensor:
        """input_ids [T], positions [T] -> hidden states [T, hidden_size], normalised, ready for `head`."""
        cos, sin = (table[positions] for table in self.rope_tables)  # [T, 1, D]
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, attention)
        return self.norm(x, residual)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab_size] for hidden states [S, hidden_size]."""
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
