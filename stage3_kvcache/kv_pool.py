"""The memory of keys and values: one row a token, flat. Who owns which row is not its business."""

import torch
from torch import Tensor

from common.config import ModelConfig


class KVCachePool:
    """`k[layer]` and `v[layer]`: [num_tokens, num_kv_heads, head_dim]."""

    def __init__(self, model: ModelConfig, num_tokens: int, device: torch.device, dtype: torch.dtype):
        shape = (2, model.num_layers, num_tokens, model.num_kv_heads, model.head_dim)
        self.num_tokens = num_tokens
        self.k, self.v = (list(half) for half in torch.zeros(shape, device=device, dtype=dtype))

    def store(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, num_kv_heads, head_dim] to the rows [T] (int64)."""
        self.k[layer].index_copy_(0, rows, k)
        self.v[layer].index_copy_(0, rows, v)
