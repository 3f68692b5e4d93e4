"""flash-attn's two functions on PyTorch's scaled_dot_product_attention: any device, dtype, head size and page size."""

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention of several sequences laid end to end.

    q [Tq, Hq, D]; k, v [Tk, Hkv, D], or pages [num_pages, page_size, Hkv, D] with block_table [B, P] int32.
    Sequence b has queries cu_seqlens_q[b]:cu_seqlens_q[b+1] and keys likewise (both int32 [B + 1]). With `causal`, its
    last query sees all its keys, the one before that one less, and so on. Without keys it gets zeros. Returns [Tq, Hq, D].
    """
    out = torch.empty_like(q)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if block_table is None:
            out[rows] = attend(q[rows], k[keys], v[keys], causal)
        else:
            n = keys.stop - keys.start
            pages = block_table[b, : -(-n // k.shape[1])]
            out[rows] = attend(q[rows], *(cache[pages].flatten(0, 1)[:n] for cache in (k, v)), causal)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One sequence: q [Sq, Hq, D], k and v [Sk, Hkv, D] -> [Sq, Hq, D]. Grouped queries share K/V without a copy."""
    (sq, _, _), (sk, heads_kv, _) = q.shape, k.shape
    q = q.transpose(0, 1).unflatten(0, (heads_kv, -1))  # [Hkv, G, Sq, D]
    k, v = (t.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    mask = None
    if causal and sq not in (1, sk):  # SDPA's own causal flag aligns the first query with the first key
        mask = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and 1 < sq == sk)
    return out.flatten(0, 1).transpose(0, 1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of a few new tokens per request over its cache.

    q [B, Sq, Hq, D]. Caches are [regions, max_len, Hkv, D] (request b in region cache_batch_idx[b], or b), or pages
    [num_pages, page_size, Hkv, D] with block_table [B, P] int32. cache_seqlens [B] int32 counts the tokens of each
    request, the new ones included if they have been stored before. Otherwise k and v [B, Sq, Hkv, D] are
    appended to the cache here. A request without any token gets zeros. Returns [B, Sq, Hq, D].
    """
    batch, sq, heads, _ = q.shape
    if block_table is None and cache_batch_idx is not None:
        block_table = cache_batch_idx[:, None]
    if k is not None:
        size = k_cache.shape[1]
        at = cache_seqlens[:, None] + torch.arange(sq, device=q.device)  # [B, Sq]
        page = (
            torch.arange(batch, device=q.device)[:, None] if block_table is None else block_table.gather(1, at // size)
        )
        slots = (page * size + at % size).flatten()
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.flatten(0, 1))
        cache_seqlens = cache_seqlens + sq
    lens = None if q.is_cuda else cache_seqlens.tolist()  # reading them back would stall a GPU
    k, v = k_cache, v_cache
    if lens:  # no more than the longest request needs
        longest = max(max(lens), 1)
        if block_table is not None:
            block_table = block_table[:, : -(-longest // k.shape[1])]
        k, v = k[:, :longest], v[:, :longest]
    if block_table is not None:
        pages = block_table.flatten()
        k, v = (cache.index_select(0, pages).view(batch, -1, *cache.shape[2:]) for cache in (k, v))
    sk, heads_kv = k.shape[1:3]
    groups = heads // heads_kv
    mask = None
    if sq > 1 or lens is None or min(lens) < sk:
        last = cache_seqlens[:, None] - 1  # [B, 1]: the newest token
        last = last + torch.arange(1 - sq, 1, device=q.device) if causal else last.expand(-1, sq)
        mask = torch.arange(sk, device=q.device) <= last[:, :, None]  # [B, Sq, Sk]
        mask = mask[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    q = q.transpose(1, 2).unflatten(1, (heads_kv, groups)).flatten(2, 3)  # [B, Hkv, G * Sq, D]
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.unflatten(2, (groups, sq)).flatten(1, 2).transpose(1, 2)
