"""The memory of keys and values: one slot per token, flat. Who owns which slot is not its business."""

import torch

from common.checkpoint import Loaded
from common.config import UserError


class KVCachePool:
    """`k[layer]` and `v[layer]`: [num_tokens, num_kv_heads, head_dim]."""

    def __init__(self, m: Loaded, num_tokens: int):
        model = m.model.config  # this process's part of the model has as many KV heads as it computes
        shape = (2, model.num_layers, num_tokens, model.num_kv_heads, model.head_dim)
        self.num_tokens = num_tokens
        try:
            self.k, self.v = (list(half) for half in torch.zeros(shape, device=m.device, dtype=m.dtype))
        except RuntimeError as error:  # the allocators' own errors, OutOfMemoryError too, are such
            size = num_tokens * model.kv_bytes_per_token(m.dtype.itemsize) / 2**30
            raise UserError(
                f"there is no memory for a KV pool of {num_tokens:,} tokens ({size:,.1f} GiB); "
                "lower --kv-tokens (or --max-running and --max-model-len, where there is no such flag)"
            ) from error
