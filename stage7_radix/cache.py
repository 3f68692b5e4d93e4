"""Pages that outlive their request: a prefix that was computed once is there for every request that begins with it."""

from dataclasses import replace

import numpy as np

from stage2_req.parts import CacheStats
from stage2_req.req import Batch, Req
from stage5_paged.cache import PagedCacheManager
from stage7_radix.params import RequestParams
from stage7_radix.radix_tree import Node, RadixTree


class RadixCacheManager(PagedCacheManager):
    """Owns the tree and every request's handle, the node up to which its pages are the tree's.

    The first `handle.depth` pages of a row of the page table belong to the tree and are locked; the others are the
    request's own. Unlocked pages of the tree count as available, and are evicted when a page is wanted.

    Only requests of equal `cache_salt` share; plain SamplingParams have the empty salt.
    """

    def __init__(self, *settings):
        super().__init__(*settings)
        self.tree = RadixTree(self.page_size)
        self.handles: dict[int, Node] = {}  # by uid
        self.hit_tokens = self.prompt_tokens = 0  # of all prompts: positions found in the tree, and all positions

    def available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable

    def take(self, n: int) -> np.ndarray:
        if self.allocator.num_free < n <= self.available():
            self.allocator.free(self.tree.evict(n - self.allocator.num_free))
        return self.allocator.alloc(n)

    def admit(self, req: Req) -> bool:
        """Like the paged one, but what is found in the tree need not be computed; one position always is."""
        pages = self.pages_for(req.device_len)
        # A look before the match, which takes time: what it can find at best is all that is locked. More of the tree would
        # not help, for an unlocked page counts as available now, and no longer once this request uses it.
        if not self.has_room(pages - self.tree.num_locked):
            return False
        node, found = self.tree.match_prefix(shareable(req), salt(req))
        self.tree.lock(node)  # before the look for room: what the request is going to use can't be evicted for it
        if not self.has_room(pages - len(found)):
            self.tree.unlock(node)
            return False
        row, self.handles[req.uid] = self.free_table_idx.pop(), node
        self.table_idx[req.uid], self.held[row] = row, len(found)
        self.set_pages(row, 0, found)
        req.cached_len = len(found) * self.page_size
        if req.cached_tokens is None:  # not when it comes back after a retraction
            req.cached_tokens = req.cached_len
            self.hit_tokens += req.cached_len
            self.prompt_tokens += req.prompt_len
        return True

    def known_len(self, req: Req) -> int:
        """Positions that a waiting request would find in the tree now."""
        return self.tree.match_len(shareable(req), salt(req))

    def set_pages(self, row: int, first: int, pages: np.ndarray) -> None:
        """Write pages into a row of the table, from column `first` on."""
        if len(pages):
            self.page_table.write(np.full(len(pages), row), np.arange(first, first + len(pages)), pages)

    def commit(self, batch: Batch) -> None:
        """A prompt's full pages can be shared at once: a step that uses them is enqueued behind the step that fills them.

        Requests that decode leave their pages to the tree when they end, so a step of decodes does nothing here.
        """
        super().commit(batch)
        for req in batch.reqs[batch.num_decodes :]:
            self.share(req)

    def share(self, req: Req) -> None:
        """Hand the full pages over to the tree and hold them there.

        If another request has computed the same meanwhile, side by side, the row gets the tree's pages, and the
        request's own are free.
        """
        row, handle = self.table_idx[req.uid], self.handles[req.uid]
        table = self.page_table.host[row]
        node, known, _ = self.insert(req, table)
        if known > handle.depth:
            duplicates = table[handle.depth : known].copy()
            self.set_pages(row, handle.depth, self.tree.pages_to(node)[handle.depth : known])
            self.allocator.free(duplicates)
        self.tree.lock(node)
        self.tree.unlock(handle)
        self.handles[req.uid] = node

    def insert(self, req: Req, pages: np.ndarray) -> tuple[Node, int, int]:
        """Into the tree, as far as pages are full. Returns the node, how many pages were there before, and are there now.

        A step under way may have computed the position of a token that the host has yet to see; that one stays out.
        """
        full = min(req.cached_len, len(req.token_ids)) // self.page_size
        return *self.tree.insert(req.token_ids[: full * self.page_size], pages, salt(req)), full

    def release(self, req: Req) -> None:
        """A request leaves all that it has computed in the tree, be it finished, aborted or retracted."""
        pages, handle = self.drop_row(req), self.handles.pop(req.uid)
        _, known, full = self.insert(req, pages)
        self.tree.unlock(handle)
        self.allocator.free(pages[handle.depth : known])  # another request was first
        self.allocator.free(pages[full:])

    def stats(self) -> CacheStats:
        return replace(super().stats(), hit_tokens=self.hit_tokens, prompt_tokens=self.prompt_tokens)

    def owned_pages(self) -> list[np.ndarray]:
        """The requests' own pages; and the tree's, as those of one more owner."""
        rows = [(self.handles[uid].depth, row) for uid, row in self.table_idx.items()]
        own = [self.page_table.host[row, depth : self.held[row]] for depth, row in rows]
        return own + [node.pages for node in self.tree.nodes()]

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self.handles.keys() == self.table_idx.keys(), "a request without a handle, or a handle without a request"
        self.tree.check_integrity(list(self.handles.values()))
        for uid, row in self.table_idx.items():
            pages = self.tree.pages_to(self.handles[uid])
            assert np.array_equal(self.page_table.host[row, : len(pages)], pages), (
                "a row's shared pages are not the tree's"
            )


def shareable(req: Req) -> list[int]:
    """The tokens whose positions need not be computed where others have: not the newest one, and of a prompt that is to be
    scored only what is."""
    end = req.device_len - 1
    return req.token_ids[: end if req.params.prompt_logprobs is None else min(end, len(req.prompt_logprobs) - 1)]


def salt(req: Req) -> str:
    return req.params.cache_salt if isinstance(req.params, RequestParams) else ""
