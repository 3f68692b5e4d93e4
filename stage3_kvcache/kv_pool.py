"""The memory of keys and values: one row a token, flat. Who owns which row is not its business."""

import torch
from torch import Tensor

from common.checkpoint import Loaded


class KVCachePool:
    """`k[layer]` and `v[layer]`: [num_tokens, num_kv_heads, head_dim]."""

    def __init__(self, m: Loaded, num_tokens: int):
        model = m.model.config
        shape = (2, model.num_layers, num_tokens, model.num_kv_heads, model.head_dim)
        self.num_tokens, self.ops = num_tokens, m.kernels.ops
        self.k, self.v = (list(half) for half in torch.zeros(shape, device=m.device, dtype=m.dtype))

    def store(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, num_kv_heads, head_dim] to the rows [T] (int64)."""
        self.ops.store_kv(self.k[layer], self.v[layer], rows, k, v)
