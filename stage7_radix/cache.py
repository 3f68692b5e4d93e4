"""Pages that outlive their request: a prefix that somebody has computed is there for whoever begins with it."""

import numpy as np

from stage2_req.req import Batch, Req
from stage5_paged.cache import PagedCacheManager
from stage7_radix.radix_tree import Node, RadixTree


class RadixCacheManager(PagedCacheManager):
    """Owns the tree and every request's handle, the node up to which its pages are the tree's.

    The first `handle.depth` pages of a table row belong to the tree and are locked; the others are the request's own.
    What nobody locks counts as available, and is evicted when a page is wanted.

    Adds an attribute to Req: `hit_len`, the positions of the prompt that it found in the tree when it was first
    admitted. Only requests of equal `params.cache_salt` share; plain SamplingParams have the empty salt.
    """

    def __init__(self, *settings):
        super().__init__(*settings)
        self.tree = RadixTree(self.page_size)
        self.handles: dict[int, Node] = {}  # by uid
        self.hit_tokens = self.lookup_tokens = 0  # of all prompts: positions found in the tree, and all positions

    def available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable

    def allocate(self, n: int) -> np.ndarray:
        if self.allocator.num_free < n <= self.available():
            self.allocator.free(self.tree.evict(n - self.allocator.num_free))
        return self.allocator.alloc(n)

    def admit(self, req: Req) -> bool:
        """Like the paged one, but what is found in the tree need not be computed; one position always is."""
        pages = self.pages_for(req.device_len)
        if not self.has_room(pages - self.tree.num_locked):  # not even if all that is locked were its prefix
            return False
        if not req.extend_len:  # retracted with its last token under way: nothing is left to compute
            return False
        node, found = self.tree.match_prefix(req.token_ids[: req.device_len - 1], salt(req))
        self.tree.lock(node)  # before looking for room: what it is going to use can't be evicted for it
        if not self.has_room(pages - len(found)):
            self.tree.unlock(node)
            return False
        row, self.handles[req.uid] = self.free_rows.pop(), node
        self.rows[req.uid], self.held[row] = row, len(found)
        self.fill(row, 0, found)
        req.cached_len = len(found) * self.page_size
        if not hasattr(req, "hit_len"):
            req.hit_len = req.cached_len
            self.hit_tokens += req.hit_len
            self.lookup_tokens += req.prompt_len
        return True

    def known_len(self, req: Req) -> int:
        """Positions that a waiting request would find in the tree now."""
        return self.tree.match_len(req.token_ids[: req.device_len - 1], salt(req))

    def fill(self, row: int, first: int, pages: np.ndarray) -> None:
        """Set a row's entries from column `first` on."""
        if len(pages):
            self.write(np.full(len(pages), row), np.arange(first, first + len(pages)), pages)

    def commit(self, batch: Batch) -> None:
        """A prompt's full pages can be shared at once: whoever uses them is enqueued behind the step that fills them.

        Decodes leave theirs when they end, so a step that only decodes does nothing here.
        """
        super().commit(batch)
        for req in batch.reqs[batch.num_decode :]:
            self.share(req)

    def share(self, req: Req) -> None:
        """Hand the full pages over to the tree and hold them there.

        If somebody else has computed the same meanwhile, side by side, the row gets the tree's pages, and the request's
        own are free.
        """
        row, handle = self.rows[req.uid], self.handles[req.uid]
        node, known, _ = self.insert(req, self.table[row])
        if known > handle.depth:
            duplicates = self.table[row, handle.depth : known].copy()
            self.fill(row, handle.depth, self.tree.pages_to(node)[handle.depth : known])
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
        self.allocator.free(pages[handle.depth : known])  # somebody else was first
        self.allocator.free(pages[full:])

    def hit_rate(self) -> float:
        """Share of all prompts' positions that were found in the tree, 0 to 1."""
        return self.hit_tokens / max(self.lookup_tokens, 1)

    def private_pages(self) -> list[np.ndarray]:
        """The requests' own pages; and the tree's, as those of one more owner."""
        own = [self.table[row, self.handles[uid].depth : self.held[row]] for uid, row in self.rows.items()]
        return own + [node.pages for node in self.tree.nodes()]

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self.handles.keys() == self.rows.keys(), "a request without a handle, or a handle without a request"
        self.tree.check_integrity(list(self.handles.values()))
        for uid, row in self.rows.items():
            pages = self.tree.pages_to(self.handles[uid])
            assert np.array_equal(self.table[row, : len(pages)], pages), "a row's shared pages are not the tree's"


def salt(req: Req) -> str:
    return getattr(req.params, "cache_salt", "")
