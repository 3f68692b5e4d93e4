"""Text generation in its simplest form: run the whole sequence through the model for every single token."""

from collections.abc import Iterator

import torch

from common.kernels import Kernels
from common.model import CausalLM


@torch.inference_mode()
def generate(model: CausalLM, kernels: Kernels, prompt_ids: list[int], max_tokens: int) -> Iterator[int]:
    """Greedy: yields the likeliest next token, up to `max_tokens` times, ending after an eos token."""
    device = model.norm.weight.device
    ids = torch.tensor(prompt_ids, device=device)
    for _ in range(max_tokens):
        length = len(ids)
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)

        def attention(layer, q, k, v, bounds=bounds, length=length):
            return kernels.flash_attn_varlen_func(q, k, v, bounds, bounds, length, length, causal=True)

        hidden = model(ids, torch.arange(length, device=device), attention)
        logits = model.head(hidden[-1:])  # of all that was computed, only the last row is new
        token = logits.argmax(-1)
        ids = torch.cat((ids, token))
        yield int(token)
        if int(token) in model.config.eos_ids:
            return
