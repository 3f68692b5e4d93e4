"""The lab, chapter 7: the radix prefix cache. Pages of 2 tokens; page numbers are 10 and up."""

import numpy as np
import torch

from stage7_radix.cache import RadixCacheManager
from stage7_radix.radix_tree import Node, RadixTree
from tests.lab.learner import batch, expect, request


def tree_of(*texts: list[int]) -> RadixTree:
    """A tree of these texts, put in one after the other. Their pages: 10, 11, … and 20, 21, … and so on."""
    tree = RadixTree(page_size=2)
    for i, text in enumerate(texts, 1):
        tree.insert(text, np.arange(10 * i, 10 * i + len(text) // 2, dtype=np.int32))
    return tree


def node_at(tree: RadixTree, text: list[int]) -> Node:
    return tree.match_prefix(text)[0]


class Test_7_1:
    """walk"""

    def test_an_empty_tree_knows_nothing(self):
        expect(
            "walk along [1, 2, 3, 4] in an empty tree", list(tree_of().walk(np.array([1, 2, 3, 4], np.int32), "")), []
        )

    def test_a_known_prefix_is_found_as_far_as_pages_agree(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        expect("match_len of 1 2 3 4 5 6 9 9 after 1 2 3 4 5 6", tree.match_len([1, 2, 3, 4, 5, 6, 9, 9]), 6)
        expect("match_len of 1 2 3 4", tree.match_len([1, 2, 3, 4]), 4)

    def test_only_whole_pages_count(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        expect("match_len of 1 2 3 9: half of page 2 agrees", tree.match_len([1, 2, 3, 9]), 2)
        expect("match_len of 1 2 3: half a page is left", tree.match_len([1, 2, 3]), 2)
        expect("match_len of 1 9: half of page 1 agrees", tree.match_len([1, 9]), 0)

    def test_it_goes_on_from_node_to_node(self):
        tree = tree_of([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
        steps = [
            (node.pages.tolist(), agreed) for node, agreed in tree.walk(np.array([1, 2, 3, 4, 5, 6], np.int32), "")
        ]
        expect("walk along 1 2 3 4 5 6: (pages of the node, how many agree)", steps, [([10, 11], 2), ([22], 1)])

    def test_another_salt_is_another_tree(self):
        tree = tree_of([1, 2, 3, 4])
        expect("match_len of 1 2 3 4 with salt 'b'", tree.match_len([1, 2, 3, 4], "b"), 0)
        expect("match_len of 1 2 3 4 without a salt", tree.match_len([1, 2, 3, 4]), 4)

    def test_a_node_that_agrees_in_part_is_the_last_even_if_the_caller_cuts_it(self):
        tree = tree_of([1, 2, 3, 4], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 7, 7])
        found = []
        for node, agreed in tree.walk(np.array([1, 2, 9, 9, 7, 7], np.int32), ""):
            found.append(agreed)
            if len(found) == 1:  # what `descend` does with it by calling `split`
                node.key, node.pages = node.key[2 * agreed :], node.pages[agreed:]
        expect("walk along 1 2 9 9 7 7, the node 1 2 3 4 cut on the way: pages that agree", found, [1])


class Test_7_2:
    """split"""

    def test_the_upper_part_has_the_first_pages(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        upper = tree.split(node_at(tree, [1, 2, 3, 4, 5, 6]), 1)
        expect("split(node of 3 pages, 1): pages of the upper part", upper.pages, [10])
        expect("its tokens", upper.key, [1, 2])
        expect("its depth", upper.depth, 1)

    def test_the_lower_part_is_the_same_object(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        node = node_at(tree, [1, 2, 3, 4, 5, 6])
        upper = tree.split(node, 1)
        expect("is the old node below the new one?", node.parent is upper, True)
        expect("pages_to(old node): the whole path, as before", tree.pages_to(node), [10, 11, 12])
        expect("its depth, as before", node.depth, 3)

    def test_both_parts_are_found(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        tree.split(node_at(tree, [1, 2, 3, 4, 5, 6]), 1)
        expect("match_len of 1 2 3 4 5 6 after the split", tree.match_len([1, 2, 3, 4, 5, 6]), 6)

    def test_a_text_that_goes_on_differently_gets_its_own_branch(self):
        tree = tree_of([1, 2, 3, 4], [1, 2, 8, 8])
        expect(
            "match_len of 1 2 3 4 and of 1 2 8 8", [tree.match_len([1, 2, 3, 4]), tree.match_len([1, 2, 8, 8])], [4, 4]
        )
        expect("num_pages: the common page is there once", tree.num_pages, 3)
        tree.check_integrity([])

    def test_holders_and_age_are_those_of_the_whole(self):
        tree = tree_of([1, 2, 3, 4])
        node = node_at(tree, [1, 2, 3, 4])
        node.locks, node.used = 2, 77
        upper = tree.split(node, 1)
        expect("(locks, used) of the upper part of a node with 2 holders, age 77", (upper.locks, upper.used), (2, 77))
        expect("(locks, used) of the lower part", (node.locks, node.used), (2, 77))


class Test_7_3:
    """lock and unlock"""

    def test_a_lock_holds_the_whole_path(self):
        tree = tree_of([1, 2], [1, 2, 3, 4])
        tree.lock(node_at(tree, [1, 2, 3, 4]))
        expect("num_locked after lock(node of 1 2 3 4)", tree.num_locked, 2)
        expect("locks of the node above", node_at(tree, [1, 2]).locks, 1)

    def test_what_lies_below_stays_free(self):
        tree = tree_of([1, 2], [1, 2, 3, 4])
        tree.lock(node_at(tree, [1, 2]))
        expect("num_evictable after lock(node of 1 2)", tree.num_evictable, 1)

    def test_pages_with_two_holders_are_counted_once(self):
        tree = tree_of([1, 2, 3, 4])
        node = node_at(tree, [1, 2, 3, 4])
        tree.lock(node)
        tree.lock(node)
        expect("num_locked after two locks", tree.num_locked, 2)
        tree.unlock(node)
        expect("num_locked after one of two unlocks", tree.num_locked, 2)
        tree.unlock(node)
        expect("num_locked after both", tree.num_locked, 0)
        tree.check_integrity([])

    def test_a_leaf_without_a_holder_is_a_candidate_again(self):
        tree = tree_of([1, 2, 3, 4])
        node = node_at(tree, [1, 2, 3, 4])
        tree.lock(node)
        tree.heap.clear()  # as `evict` does when it comes to a locked node
        node.queued = False
        tree.unlock(node)
        expect("nodes in the heap after unlock", [entry[-1] is node for entry in tree.heap], [True])


class Test_7_4:
    """evict"""

    def test_the_least_recently_used_leaf_goes_first(self):
        tree = tree_of([1, 2], [3, 4], [5, 6])
        node_at(tree, [1, 2])  # used again: now 3 4 is the oldest
        expect("evict(1)", tree.evict(1), [20])
        expect("evict(1) again", tree.evict(1), [30])

    def test_what_is_held_stays(self):
        tree = tree_of([1, 2])
        node, _ = tree.insert([3, 4], np.array([30], np.int32))
        tree.lock(node)
        expect("evict(5) with page 30 held", tree.evict(5), [10])
        tree.unlock(node)
        expect("evict(5) after unlock", tree.evict(5), [30])

    def test_the_last_leaf_loses_no_more_than_is_needed(self):
        tree = tree_of([1, 2, 3, 4, 5, 6])
        expect("evict(1) of a leaf with pages 10, 11, 12", tree.evict(1), [12])
        expect("match_len of 1 2 3 4 5 6 after that", tree.match_len([1, 2, 3, 4, 5, 6]), 4)
        tree.check_integrity([])

    def test_from_the_leaves_inwards(self):
        tree = tree_of([1, 2], [1, 2, 3, 4])
        expect("evict(1): the leaf, not what lies above it", tree.evict(1), [21])
        expect("evict(1) again: what was above is a leaf now", tree.evict(1), [10])
        expect("num_pages of the empty tree", tree.num_pages, 0)
        tree.check_integrity([])

    def test_more_than_there_is(self):
        tree = tree_of([1, 2, 3, 4], [5, 6])
        expect("evict(9) of 3 pages, sorted", sorted(tree.evict(9)), [10, 11, 20])
        expect("evict(1) of an empty tree", tree.evict(1), [])


def prefilled(*prompts: int) -> tuple[RadixCacheManager, list]:
    """Requests with equal prompts 10, 11, …, as long as given, computed side by side in one step."""
    cache = RadixCacheManager(16, 2, 4, 32, torch.device("cpu"))  # 16 pages of 2 tokens
    reqs = [request(length, uid) for uid, length in enumerate(prompts)]
    for req in reqs:
        assert cache.admit(req)
    picks = [(req, req.extend_len) for req in reqs]
    cache.commit(batch(*picks, table_idx=cache.allocate(picks)))
    return cache, reqs


class Test_7_5:
    """share"""

    def test_full_pages_go_into_the_tree(self):
        cache, _ = prefilled(5)
        expect("pages in the tree after a prompt of 5 tokens", cache.tree.num_pages, 2)
        expect("what another request with this prompt would find", cache.known_len(request(5, uid=7)), 4)

    def test_the_request_holds_them_there(self):
        cache, (a,) = prefilled(5)
        expect("locked pages of the tree", cache.tree.num_locked, 2)
        expect("depth of its handle", cache.handles[a.uid].depth, 2)

    def test_of_two_equal_prompts_the_second_takes_the_pages_of_the_first(self):
        cache, (a, b) = prefilled(5, 5)
        rows = [cache.page_table.host[cache.table_idx[req.uid], :2].tolist() for req in (a, b)]
        expect("first two pages of the second request: those of the first", rows[1], rows[0])

    def test_its_own_copies_are_free(self):
        cache, _ = prefilled(5, 5)
        expect("free pages of 16: 2 shared, and a tail of 1 for each", cache.allocator.num_free, 16 - 2 - 1 - 1)
        cache.check_integrity()

    def test_each_of_the_two_holds_a_lock(self):
        cache, (a, b) = prefilled(5, 5)
        cache.release(a)
        expect("locked pages after the first has ended", cache.tree.num_locked, 2)
        cache.release(b)
        expect("locked pages after both have ended", cache.tree.num_locked, 0)
        cache.check_integrity()
