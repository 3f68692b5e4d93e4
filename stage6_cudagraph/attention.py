"""Attention metadata that never moves: the same types as in an eager step, at a padded size.

A CUDA graph repeats the same kernels on the same addresses. So the lengths and table indices of the requests are in static
buffers, and the rest (which pages, up to where) is looked up on the device, as a part of the captured step.
"""

from torch import Tensor

from stage4_batch.attention import Decodes, PagedAttention, PagedMetadata


def padding_page(attention: PagedAttention) -> int:
    """The page beyond the allocator's range, which takes what padding writes."""
    return attention.pool.num_tokens // attention.page_table.page_size - 1


def padded_decodes(attention: PagedAttention, table_idx: Tensor, positions: Tensor) -> Decodes:
    """table_idx and positions [D] int32. A padding entry has index -1 and position 0: a request of its own, the first token
    of a text in the padding page. It reads nothing of other requests and writes nothing into their pages."""
    pages = attention.page_table.device[table_idx]  # index -1 reads some request's pages, which are replaced
    pages.masked_fill_((table_idx < 0)[:, None], padding_page(attention))
    return Decodes(cache_seqlens=positions, page_table=pages)


class MixedAttention(PagedAttention):
    """Decodes and chunks in one step, when the host does not say how many there are of each.

    Every token belongs to a sequence of the prefill kernel: the first holds the decodes, then come the chunks, then
    empty ones for chunks that are not there, and the last holds the padding. The first and the last have no keys, so
    their tokens get zeros; and a decode that is not there gets zeros from the decode kernel. The sum is right for all.
    """

    def __call__(self, metadata: PagedMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]"""
        self.kernels.ops.store_kv(self.pool.k[layer], self.pool.v[layer], metadata.out_loc, k, v)
        d = len(metadata.decodes.cache_seqlens)
        out = self.prefill(metadata.chunks, layer, q, k, v)
        out[:d] += self.decode(metadata.decodes, layer, q[:d])
        return out
