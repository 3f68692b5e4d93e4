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
    last query sees all its keys, the one before that one less, and so on. Returns [Tq, Hq, D].
    """
    out = torch.empty_like(q)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if block_table is None:
            out[rows] = attend(q[rows], k[keys], v[keys], causal)
        else:
            table, n = block_table[b], keys.stop - keys.start
            out[rows] = attend(q[rows], k[table].flatten(0, 1)[:n], v[table].flatten(0, 1)[:n], causal)
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
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of a few new tokens a request over its cache, in which their K and V have been stored already.

    q [B, Sq, Hq, D]. Caches are [slots, max_len, Hkv, D] (request b in slot cache_batch_idx[b], or b), or pages
    [num_pages, page_size, Hkv, D] with block_table [B, P] int32. cache_seqlens [B] int32 counts the rows of each
    request, the new ones included. Returns [B, Sq, Hq, D].
    """
    batch, sq, heads, _ = q.shape
    lens = None if q.is_cuda else cache_seqlens.tolist()  # reading them back would stall a GPU
    if block_table is not None:
        k, v = (
            cache.index_select(0, block_table.flatten()).view(batch, -1, *cache.shape[2:])
            for cache in (k_cache, v_cache)
        )
    else:
        k, v = (cache[:, : max(lens)] if lens else cache for cache in (k_cache, v_cache))
        if cache_batch_idx is not None:
            k, v = k.index_select(0, cache_batch_idx), v.index_select(0, cache_batch_idx)
    sk, heads_kv = k.shape[1:3]
    groups = heads // heads_kv
    mask = None
    if sq > 1 or lens is None or min(lens) < sk:
        last = cache_seqlens[:, None] - 1  # [B, 1]: the newest row
        last = last + torch.arange(1 - sq, 1, device=q.device) if causal else last.expand(-1, sq)
        mask = torch.arange(sk, device=q.device) <= last[:, :, None]  # [B, Sq, Sk]
        mask = mask[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    q = q.transpose(1, 2).unflatten(1, (heads_kv, groups)).flatten(2, 3)  # [B, Hkv, G * Sq, D]
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.unflatten(2, (groups, sq)).flatten(1, 2).transpose(1, 2)
