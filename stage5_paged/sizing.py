"""How many tokens the KV pool can hold."""

import gc
import os
import sys

import numpy as np
import torch

from common.checkpoint import Loaded
from common.config import UserError
from common.device import timed_start
from stage2_req.attention import FullAttention
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage2_req.runner import ModelRunner
from stage2_req.sampling import GumbelSampler


def pool_tokens(m: Loaded) -> int:
    """Tokens for the pool, a whole number of pages; prints on stderr what it took. Raises UserError if that is too few."""
    size, per_token = m.config.page_size, m.model.config.kv_bytes_per_token(m.dtype.itemsize)
    tokens = m.config.kv_tokens
    note = ""
    if tokens is None:
        with timed_start("a step of the largest size, for its memory", m.device):
            room, note = measure_room(m)
        tokens = max(0, room) // per_token
    elif (need := tokens * per_token) > (total := memory_of(m.device)):
        raise UserError(
            f"{tokens:,} KV tokens take {need / 2**30:,.1f} GiB, and {m.device} has {total / 2**30:,.1f}; lower --kv-tokens"
        )
    tokens = tokens // size * size
    if not tokens:
        raise UserError(
            f"no room for a page of {size} tokens ({per_token * size / 2**20:.1f} MiB){note}; raise --memory-fraction or --kv-tokens, or lower --max-batch-tokens or --page-size"
        )
    print(
        f"KV pool: {tokens:,} tokens in {tokens // size:,} pages of {size}, {tokens * per_token / 2**30:.2f} GiB{note}",
        file=sys.stderr,
    )
    return tokens


def memory_of(device: torch.device) -> int:
    """Bytes in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize


@torch.inference_mode()
def measure_room(m: Loaded) -> tuple[int, str]:
    """Bytes of a GPU that are left for the pool after weights and the largest step, and a note that says so."""
    config, device = m.config, m.device
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1)
    count = config.max_running
    longest = min(-(-config.max_batch_tokens // count), config.max_model_len)
    reqs = [Req(uid, [0] * longest, params, uid, longest, frozenset()) for uid in range(count)]
    batch = Batch.build([(req, longest) for req in reqs], np.zeros(count, np.int64))
    ModelRunner(m.model, FullAttention(m.kernels, device), GumbelSampler(m.kernels.ops)).forward(batch)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    del batch, reqs
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * config.memory_fraction) - (total - free) - step
    return (
        room,
        f" ({total / 2**30:.1f} GiB x {config.memory_fraction} less {(total - free) / 2**30:.1f} in use and {step / 2**30:.1f} for the largest step)",
    )
