"""A compressed radix tree over token ids: which pages hold the keys and values of a prefix that was computed before.

It knows tokens and page numbers, nothing of requests or of the engine. A request that uses a node locks it, and with it
the path up to the root. What is not locked can be evicted, from the leaves inwards, the least recently used first.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

NO_PAGES = np.empty(0, np.int32)


class Node:
    """An edge of the tree and what hangs on it: whole pages of tokens, at least one."""

    def __init__(self, parent: "Node | None", salt: str, key: np.ndarray, pages: np.ndarray, used: int):
        self.parent, self.salt = parent, salt
        self.key, self.pages = key, pages  # [n * page_size] tokens and [n] page numbers, int32
        self.depth: int = len(pages) + (parent.depth if parent else 0)  # pages from the root to the end of this node
        self.children: dict[tuple[str, bytes], Node] = {}
        self.locks = 0  # holders of this node or of one below it
        self.used = used  # when it was last part of a match or an insertion
        self.queued = False  # has it an entry in the tree's heap?


class RadixTree:
    """Prefixes of whole pages. Page numbers that come in are copied, and belong to the tree until `evict` returns them.

    The clock counts matches and insertions, so that every rank of a parallel engine evicts alike.
    """

    def __init__(self, page_size: int):
        self.page_size, self.clock, self.entries = page_size, count(1), count()
        self.root = Node(None, "", NO_PAGES, NO_PAGES, 0)
        self.num_pages = self.num_locked = 0
        self.heap: list[tuple[int, int, Node]] = []  # (used, number of the entry, node)

    # --- look up and add --------------------------------------------------------------------------------------------

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> tuple[Node, np.ndarray]:
        """The longest known prefix of `tokens`, in whole pages: the node where it ends, and its pages (a copy).

        A node that agrees only in part is split there. All nodes of the path become the most recently used.
        """
        node = self.descend(np.asarray(tokens, np.int32), salt)
        return node, self.pages_to(node)

    def insert(self, tokens: Sequence[int], pages: np.ndarray, salt: str = "") -> tuple[Node, int]:
        """Add the whole pages of `tokens`, which lie in `pages` (there may be more of those).

        Returns the node where they end, and how many leading pages were here before. The tree takes over the others;
        of those that were here it keeps its own, and the caller's duplicates stay the caller's.
        """
        tokens = np.asarray(tokens, np.int32)
        node = self.descend(tokens, salt)
        known, full = node.depth, len(tokens) // self.page_size
        if known < full:
            key = tokens[known * self.page_size : full * self.page_size].copy()
            node = Node(node, salt, key, pages[known:full].astype(np.int32), node.used)
            node.parent.children[self.edge(salt, key)] = node
            self.num_pages += full - known
            self.enqueue(node)
        return node, known

    def descend(self, tokens: np.ndarray, salt: str) -> Node:
        """To the end of the longest known prefix, splitting a node that goes on differently; the path is fresh then."""
        node = self.root
        node.used = next(self.clock)
        for child, agreed in self.walk(tokens, salt):
            node = child if agreed == len(child.pages) else self.split(child, agreed)
            node.used = self.root.used
        return node

    def match_len(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many tokens `match_prefix` would find. Changes nothing."""
        return sum(agreed for _, agreed in self.walk(np.asarray(tokens, np.int32), salt)) * self.page_size

    def walk(self, tokens: np.ndarray, salt: str) -> Iterator[tuple[Node, int]]:
        """The nodes along `tokens`, each with the number of its pages that agree; only the last may agree in part."""
        node, start = self.root, 0
        while child := node.children.get(self.edge(salt, tokens[start:])):
            length = min(len(child.key), (len(tokens) - start) // self.page_size * self.page_size)
            same = child.key[:length] == tokens[start : start + length]
            agreed = (length if same.all() else int(same.argmin())) // self.page_size
            whole = agreed == len(child.pages)  # before the caller may split it
            yield child, agreed
            if not whole:
                return
            node, start = child, start + length

    def edge(self, salt: str, tokens: np.ndarray) -> tuple[str, bytes]:
        """Under which name a node that begins with these tokens is found; no node has the name of less than a page."""
        return salt, tokens[: self.page_size].tobytes()

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after so many pages; returns the new upper part. The lower part stays the same object: handles on it stay
        valid."""
        cut = num_pages * self.page_size
        upper = Node(node.parent, node.salt, node.key[:cut], node.pages[:num_pages], node.used)
        upper.locks = node.locks
        node.parent.children[self.edge(node.salt, node.key)] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        upper.children[self.edge(node.salt, node.key)] = node
        return upper

    def pages_to(self, node: Node) -> np.ndarray:
        """All pages from the root to the end of a node; a copy."""
        return np.concatenate([NO_PAGES, *(part.pages for part in self.path(node))][::-1])

    def path(self, node: Node) -> Iterator[Node]:
        """The node, its parent, and so on; without the root."""
        while node is not self.root:
            yield node
            node = node.parent

    # --- hold and evict ---------------------------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages; below an unlocked node nothing is locked, so all of these can be reached from the leaves."""
        return self.num_pages - self.num_locked

    def lock(self, node: Node) -> None:
        """Nothing up to the end of this node will be evicted until it is unlocked as often as it was locked."""
        for part in self.path(node):
            self.num_locked += len(part.pages) * (part.locks == 0)
            part.locks += 1

    def unlock(self, node: Node) -> None:
        for part in self.path(node):
            part.locks -= 1
            self.num_locked -= len(part.pages) * (part.locks == 0)
        self.enqueue(node)

    def enqueue(self, node: Node) -> None:
        """Remember a node as a candidate, if it is an unlocked leaf. Each of those has exactly one entry in the heap.

        A node that is used, locked or extended leaves its entry behind: `evict` sees that when it comes to it.
        """
        if node is not self.root and not (node.queued or node.children or node.locks):
            node.queued = True
            heapq.heappush(self.heap, (node.used, next(self.entries), node))

    def evict(self, n: int) -> np.ndarray:
        """Take n pages out, or all that are not locked; returns their numbers. O(log nodes) per page.

        The last leaf loses no more than is needed, from its tail.
        """
        freed = [NO_PAGES]
        while n > 0 and self.heap:
            used, _, node = heapq.heappop(self.heap)
            node.queued = False
            if node.used == used and not (node.children or node.locks):
                kept = max(0, len(node.pages) - n)
                freed.append(node.pages[kept:])
                n -= len(freed[-1])
                node = self.shorten(node, kept)
            # what is left of it; or its parent, a leaf now perhaps; or, where it belongs now, one that was used since
            self.enqueue(node)
        freed = np.concatenate(freed)
        self.num_pages -= len(freed)
        return freed

    def shorten(self, leaf: Node, kept: int) -> Node:
        """Keep so many pages of an unlocked leaf; returns it, or its parent if that was none."""
        if not kept:
            del leaf.parent.children[self.edge(leaf.salt, leaf.key)]
            return leaf.parent
        leaf.depth -= len(leaf.pages) - kept
        leaf.key, leaf.pages = leaf.key[: kept * self.page_size], leaf.pages[:kept]
        return leaf

    # --- look inside ------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            stack += (node := stack.pop()).children.values()
            if node is not self.root:
                yield node

    def check_integrity(self, holders: Sequence[Node]) -> None:
        """AssertionError unless the tree is in order, and locked by exactly these holders (one node for each lock)."""
        locks: dict[Node, int] = {}
        for part in (part for node in holders for part in self.path(node)):
            locks[part] = locks.get(part, 0) + 1
        nodes = list(self.nodes())
        assert locks.keys() <= set(nodes), "a holder's node is not in the tree"
        for node in nodes:
            assert len(node.key) == len(node.pages) * self.page_size > 0, "a node is empty, or not in whole pages"
            assert node.parent is self.root or node.parent.salt == node.salt, "two salts share a path"
            assert node.parent.children.get(self.edge(node.salt, node.key)) is node, (
                "a node is not where it is looked for"
            )
            assert node.depth == node.parent.depth + len(node.pages), "a depth is wrong"
            assert node.locks == locks.get(node, 0), "locks differ from the holders"
            assert node.parent.used >= node.used, "a node is fresher than the path to it"
            assert node.queued or node.children or node.locks, "an unlocked leaf is not in the heap"
        queued = [node for *_, node in self.heap]
        assert len(queued) == len(set(queued)), "a node is in the heap twice"
        assert set(queued) == {node for node in nodes if node.queued}, "the heap and the nodes' `queued` differ"
        assert self.num_pages == sum(len(node.pages) for node in nodes), "pages are miscounted"
        assert self.num_locked == sum(len(node.pages) for node in nodes if node.locks), "locked pages are miscounted"
