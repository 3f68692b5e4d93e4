"""The radix tree against a plain dict of prefixes, page by page; and the cases in which a tree is easily wrong.

The model keeps one entry for every page: (salt, all tokens up to its end) -> page number, age, holders. It evicts by
looking at all of them. HYPOTHESIS_PROFILE=nightly tries many more histories.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from stage7_radix.radix_tree import RadixTree
from tests.conftest import PROFILE

SETTINGS = settings(PROFILE, max_examples=PROFILE.max_examples, stateful_step_count=60)


class History(RuleBasedStateMachine):
    page_size = 1

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(self.page_size)
        self.pages: dict[tuple, int] = {}
        self.ages: dict[tuple, int] = {}
        self.holders = []  # (node, prefixes that it holds)
        self.tick = self.next_page = 0

    def tokens(self, letters: list[int], tail: int) -> list[int]:
        """A page for each letter. They differ in their last token alone; behind them comes a part of a page."""
        page = [7] * (self.page_size - 1)
        return [token for letter in letters for token in (*page, letter)] + page[:tail]

    def prefixes(self, tokens: list[int], salt: str) -> list[tuple]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def known(self, tokens, salt) -> list[tuple]:
        return [prefix for prefix in self.prefixes(tokens, salt) if prefix in self.pages]

    def touch(self, prefixes) -> None:
        self.tick += 1
        self.ages |= dict.fromkeys(prefixes, self.tick)

    def held(self, prefix) -> bool:
        return any(prefix in prefixes for _, prefixes in self.holders)

    texts = st.builds(
        lambda letters, tail: (letters, tail), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 15)
    )
    salts = st.sampled_from(["", "", "", "a"])

    @rule(text=texts, salt=salts, extra=st.integers(0, 2))
    def insert(self, text, salt, extra):
        tokens = self.tokens(*text)
        prefixes, known = self.prefixes(tokens, salt), self.known(tokens, salt)
        mine = np.arange(self.next_page, self.next_page + len(prefixes) + extra, dtype=np.int32)
        self.next_page += len(mine)
        theirs = np.array(tokens, np.int32)
        node, before = self.tree.insert(theirs, mine, salt)
        assert before == len(known)
        self.pages |= zip(prefixes[before:], mine[before : len(prefixes)].tolist(), strict=True)
        self.touch(prefixes)
        mine[:] = theirs[:] = -1  # what the tree has must be a copy
        assert self.tree.pages_to(node).tolist() == [self.pages[prefix] for prefix in prefixes]

    @rule(text=texts, salt=salts, lock=st.booleans())
    def match(self, text, salt, lock):
        tokens = self.tokens(*text)
        known = self.known(tokens, salt)
        assert self.tree.match_len(tokens, salt) == len(known) * self.page_size
        node, pages = self.tree.match_prefix(tokens, salt)
        assert pages.tolist() == [self.pages[prefix] for prefix in known]
        self.touch(known)
        pages[:] = -1
        if lock:
            self.tree.lock(node)
            self.holders.append((node, set(known)))

    @rule(text=texts, salt=salts)
    def a_look_changes_nothing(self, text, salt):
        """Eviction sees it if it does: the model's ages stay."""
        self.tree.match_len(self.tokens(*text), salt)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 20))
    def unlock(self, choice):
        self.tree.unlock(self.holders.pop(choice % len(self.holders))[0])

    @rule(n=st.integers(0, 9))
    def evict(self, n):
        expected = []
        for _ in range(n):
            inner = {(salt, tokens[: -self.page_size]) for salt, tokens in self.pages}
            leaves = [prefix for prefix in self.pages if prefix not in inner and not self.held(prefix)]
            if leaves:
                oldest = min(leaves, key=lambda prefix: self.ages[prefix])
                expected.append(self.pages.pop(oldest))
        assert sorted(self.tree.evict(n).tolist()) == sorted(expected)

    @invariant()
    def counts(self):
        self.tree.check_integrity([node for node, _ in self.holders])
        assert self.tree.num_pages == len(self.pages)
        assert self.tree.num_evictable == sum(not self.held(prefix) for prefix in self.pages)

    def teardown(self):
        while self.holders:
            self.unlock(0)
        self.evict(len(self.pages))
        assert not self.pages
        assert not list(self.tree.nodes())
        assert not self.tree.heap


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_tree_is_a_dict_of_prefixes(page_size):
    run_state_machine_as_test(type("Sized", (History,), {"page_size": page_size}), settings=SETTINGS)


# --- one case each ----------------------------------------------------------------------------------------------


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.fixture
def tree() -> RadixTree:
    """Pages of two tokens: 1..8 in pages 10..13, and 1 2 3 4 9 9 in 10 11 20."""
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], pages(10, 11, 12, 13))
    tree.insert([1, 2, 3, 4, 9, 9], pages(0, 1, 20))
    return tree


def test_a_prefix_that_is_a_strict_part_of_a_node(tree):
    node, found = tree.match_prefix([1, 2])
    assert found.tolist() == [10]
    assert node.depth == 1
    tree.lock(node)
    assert sorted(tree.evict(100).tolist()) == [11, 12, 13, 20]
    assert tree.match_prefix([1, 2, 3, 4])[1].tolist() == [10]
    tree.unlock(node)
    assert tree.evict(100).tolist() == [10]


@pytest.mark.parametrize(("tokens", "found"), [
    ([], []),
    ([1], []),
    ([1, 3], []),
    ([1, 2], [10]),
    ([1, 2, 3], [10]),
    ([1, 2, 3, 4, 5, 7], [10, 11]),
    ([1, 2, 3, 4, 9, 9, 9], [10, 11, 20]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13]),
    ([2, 3, 4], []),
])  # fmt: skip
def test_matches_come_in_whole_pages(tree, tokens, found):
    assert tree.match_prefix(tokens)[1].tolist() == found
    assert tree.match_len(tokens) == 2 * len(found)


def test_the_least_recently_used_leaf_goes_first_and_loses_no_more_than_is_needed(tree):
    tree.match_prefix([1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.evict(1).tolist() == [20]
    assert tree.evict(1).tolist() == [13]
    assert tree.match_prefix([1, 2, 3, 4, 5, 6, 7, 8])[1].tolist() == [10, 11, 12]
    assert sorted(tree.evict(100).tolist()) == [10, 11, 12]
    assert tree.evict(1).tolist() == []


def test_order_of_eviction_after_a_split():
    """Both parts of a split have the age of the whole; the part that is matched alone becomes fresh alone."""
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], pages(0, 1, 2, 3))
    tree.insert([5, 6], pages(4, 5))
    tree.match_prefix([1, 2])
    assert tree.evict(2).tolist() == [2, 3]  # the lower half is as old as before, older than 5 6
    assert sorted(tree.evict(2).tolist()) == [4, 5]
    assert sorted(tree.evict(2).tolist()) == [0, 1]


def test_what_was_locked_right_after_its_insertion_stays():
    """Its entry in the heap is as fresh as the node: only the lock says that it must not go."""
    tree = RadixTree(1)
    node, _ = tree.insert([1, 2, 3], np.arange(3, dtype=np.int32))
    tree.lock(node)
    assert len(tree.evict(3)) == 0
    tree.check_integrity([node])
    tree.unlock(node)
    assert sorted(tree.evict(3)) == [0, 1, 2]


def test_a_split_keeps_locks_and_handles():
    tree = RadixTree(1)
    node, _ = tree.insert([1, 2, 3, 4], pages(0, 1, 2, 3))
    tree.lock(node)
    upper, _ = tree.match_prefix([1, 2])
    assert (upper.locks, node.locks, node.depth) == (1, 1, 4)
    assert tree.pages_to(node).tolist() == [0, 1, 2, 3]
    assert tree.num_evictable == 0
    tree.unlock(node)
    assert tree.num_evictable == 4
    assert sorted(tree.evict(9).tolist()) == [0, 1, 2, 3]


def test_salts_never_meet():
    tree = RadixTree(1)
    tree.insert([1, 2, 3], pages(0, 1, 2), "a")
    assert tree.match_prefix([1, 2, 3])[1].tolist() == []
    assert tree.match_prefix([1, 2, 3], "b")[1].tolist() == []
    assert tree.insert([1, 2, 3], pages(3, 4, 5), "b")[1] == 0
    assert tree.match_prefix([1, 2, 3], "a")[1].tolist() == [0, 1, 2]
    assert sorted(tree.evict(6).tolist()) == [0, 1, 2, 3, 4, 5]
    assert not tree.root.children, "an empty tree keeps nothing of a salt"


def test_many_leaves_are_evicted_without_looking_at_all_of_them():
    """The heap holds one entry for each leaf, however often it was used, and a page costs a few entries at most."""
    tree = RadixTree(1)
    for i in range(1000):
        tree.insert([i, 0, 1], pages(3 * i, 3 * i + 1, 3 * i + 2))
    for _ in range(5):
        for i in range(1000):
            node, _ = tree.match_prefix([i, 0, 1])
            tree.lock(node)
            tree.unlock(node)
    assert len(tree.heap) == 1000
    assert [int(tree.evict(3).max()) // 3 for _ in range(1000)] == list(range(1000))


SPOILERS = {
    "locks differ": lambda tree: tree.lock(tree.match_prefix([1, 2])[0]),
    "pages are miscounted": lambda tree: setattr(tree, "num_pages", 7),
    "locked pages are miscounted": lambda tree: setattr(tree, "num_locked", 1),
    "depth is wrong": lambda tree: setattr(tree.match_prefix([1, 2])[0], "depth", 5),
    "fresher": lambda tree: setattr(tree.match_prefix([1, 2, 3, 4, 5, 6])[0], "used", 10**6),
    "not in the heap": lambda tree: setattr(tree.match_prefix([1, 2, 3, 4, 9, 9])[0], "queued", False),
    "looked for": lambda tree: tree.match_prefix([1, 2])[0].key.__setitem__(0, 3),
    "two salts": lambda tree: setattr(tree.match_prefix([1, 2, 3, 4, 9, 9])[0], "salt", "a"),
}


@pytest.mark.parametrize("damage", SPOILERS)
def test_the_integrity_check_sees(tree, damage):
    tree.check_integrity([])
    SPOILERS[damage](tree)
    with pytest.raises(AssertionError, match=damage):
        tree.check_integrity([])


def test_a_holder_must_be_in_the_tree(tree):
    node, _ = tree.match_prefix([1, 2, 3, 4, 9, 9])
    tree.evict(100)
    with pytest.raises(AssertionError, match="not in the tree"):
        tree.check_integrity([node])
