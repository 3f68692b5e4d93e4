"""The lab, chapter 5: pages."""

import numpy as np
import torch

from stage5_paged.cache import PagedCacheManager
from stage5_paged.page_allocator import OutOfPages, PageAllocator
from stage5_paged.scheduler import PagedScheduler
from tests.lab.learner import expect, expect_error, request


class Test_5_1:
    """alloc and free"""

    def test_every_page_is_handed_out_once(self):
        allocator = PageAllocator(4)
        pages = [*allocator.alloc(1), *allocator.alloc(3)]
        expect("alloc(1) and alloc(3) of 4 pages, sorted", sorted(pages), [0, 1, 2, 3])

    def test_more_than_there_are_is_refused_and_nothing_is_taken(self):
        allocator = PageAllocator(4)
        first = allocator.alloc(2)
        expect_error("alloc(3) with 2 pages free", lambda: allocator.alloc(3), OutOfPages)
        expect("num_free after that", allocator.num_free, 2)
        expect("alloc(2) after that, with the first two", sorted([*first, *allocator.alloc(2)]), [0, 1, 2, 3])

    def test_what_was_given_back_can_be_had_again(self):
        allocator = PageAllocator(4)
        pages = allocator.alloc(3)
        allocator.free(pages[:2])
        expect("num_free after alloc(3) of 4 and free of 2", allocator.num_free, 3)
        expect("alloc(3), and the page that was kept", sorted([*allocator.alloc(3), pages[2]]), [0, 1, 2, 3])

    def test_the_pages_belong_to_the_caller(self):
        allocator = PageAllocator(4)
        pages = allocator.alloc(2)
        kept = pages.copy()
        allocator.free(pages)
        allocator.alloc(4)
        allocator.free(np.array([3, 2, 1, 0], np.int32))
        expect("the array that alloc(2) returned, after other calls", pages, kept.tolist())

    def test_free_pages_lists_those_that_nobody_has(self):
        allocator = PageAllocator(4)
        pages = allocator.alloc(3)
        expect(
            "free_pages() with the pages that alloc(3) gave", sorted([*allocator.free_pages(), *pages]), [0, 1, 2, 3]
        )
        allocator.free(pages[:1])
        expect("len(free_pages()) after one came back", len(allocator.free_pages()), 2)


def cache_of(num_pages: int, page_size: int = 4, max_running: int = 4) -> PagedCacheManager:
    return PagedCacheManager(num_pages, page_size, max_running, max_len=64, device=torch.device("cpu"))


def admitted(cache: PagedCacheManager, *lengths: int) -> list:
    """Requests with prompts of these lengths, uids 0, 1, …, that have been let in."""
    reqs = [request(length, uid, max_tokens=20) for uid, length in enumerate(lengths)]
    for req in reqs:
        assert cache.admit(req), "admit() did not let a request in"
    return reqs


class Test_5_2:
    """has_room"""

    def test_an_empty_pool_has_room_for_all_its_pages(self):
        expect("has_room(10) with 10 free pages", cache_of(10).has_room(10), True)
        expect("has_room(11) with 10 free pages", cache_of(10).has_room(11), False)

    def test_every_running_request_keeps_some_head_room(self):
        cache = cache_of(10, page_size=16)  # 16 tokens of head-room: one page for each
        admitted(cache, 3, 3)
        expect("has_room(8): 10 free, 2 requests run", cache.has_room(8), True)
        expect("has_room(9): 10 free, 2 requests run", cache.has_room(9), False)

    def test_head_room_is_counted_in_whole_pages(self):
        cache = cache_of(12, page_size=64)  # 16 tokens are a quarter of a page, so a page
        admitted(cache, 3, 3)
        expect("has_room(10) with pages of 64: 12 free, 2 requests run", cache.has_room(10), True)
        expect("has_room(11) with pages of 64: 12 free, 2 requests run", cache.has_room(11), False)

    def test_a_row_of_the_page_table_must_be_free_too(self):
        cache = cache_of(100, max_running=1)
        expect("has_room(1) before anyone runs, max_running 1", cache.has_room(1), True)
        admitted(cache, 3)
        expect("has_room(1) with 1 of 1 request running", cache.has_room(1), False)


class Test_5_3:
    """allocate"""

    def test_a_request_gets_as_many_pages_as_its_positions_need(self):
        cache = cache_of(20)
        a, b = admitted(cache, 6, 9)
        cache.allocate([(a, 6), (b, 9)])
        expect("available() of 20 after 6 and 9 positions in pages of 4", cache.available(), 20 - 2 - 3)

    def test_no_page_is_taken_while_the_last_one_has_space(self):
        cache = cache_of(20)
        (a,) = admitted(cache, 6)
        cache.allocate([(a, 6)])
        a.cached_len, before = 6, cache.available()
        cache.allocate([(a, 2)])
        expect("pages taken for positions 6 and 7", before - cache.available(), 0)
        a.cached_len = 8
        cache.allocate([(a, 1)])
        expect("pages taken for position 8", before - cache.available(), 1)

    def test_no_two_positions_have_the_same_slot(self):
        cache = cache_of(20)
        a, b = admitted(cache, 6, 9)
        cache.allocate([(a, 6), (b, 3)])
        a.cached_len, b.cached_len = 6, 3
        index = cache.allocate([(a, 5), (b, 6)])
        slots = cache.page_table.slots(np.repeat(index, [11, 9]), np.r_[:11, :9])
        expect("different slots of 11 and 9 positions, each request grown once", len(set(slots.tolist())), 20)
        slots = cache.page_table.slots(np.repeat(index, 4), np.r_[:4, :4]) // 4
        expect("different pages of the two first pages", len(set(slots.tolist())), 2)

    def test_it_returns_the_place_of_each_request_in_the_page_table(self):
        cache = cache_of(20)
        a, b = admitted(cache, 6, 9)
        expect("allocate([(b, 1), (a, 1)])", cache.allocate([(b, 1), (a, 1)]), [cache.table_idx[1], cache.table_idx[0]])

    def test_all_or_nothing(self):
        cache = cache_of(16)
        a, b = admitted(cache, 6, 20)
        expect_error("allocate 8 + 60 positions, 16 pages of 4", lambda: cache.allocate([(a, 8), (b, 60)]), OutOfPages)
        expect("available() after that", cache.available(), 16)
        cache.check_integrity()

    def test_the_device_sees_the_same_table(self):
        cache = cache_of(20)
        a, b = admitted(cache, 6, 9)
        index = cache.allocate([(a, 6), (b, 9)])
        table = cache.page_table
        expect("the device's copy of the table", table.device[index.tolist(), :2], table.host[index, :2].tolist())
        cache.check_integrity()


def three_running() -> PagedScheduler:
    """Requests 0, 1, 2 run, 3 waits: there is no row for it."""
    scheduler = PagedScheduler(cache_of(40, max_running=3), budget=64)
    for uid in range(4):
        scheduler.add(request(6, uid, max_tokens=20))
    scheduler.schedule()
    return scheduler


def uids(reqs) -> list[int]:
    return [req.uid for req in reqs]


class Test_5_4:
    """retract"""

    def test_the_youngest_gives_way_and_waits_at_the_head(self):
        scheduler = three_running()
        scheduler.retract()
        expect("uids that run after retract()", uids(scheduler.running), [0, 1])
        expect("uids that wait after retract()", uids(scheduler.waiting), [2, 3])

    def test_its_pages_are_free_again(self):
        scheduler = three_running()
        scheduler.retract()
        expect("available() of 40 with two requests of 2 pages left", scheduler.cache.available(), 40 - 4)
        scheduler.cache.check_integrity()

    def test_it_keeps_its_tokens(self):
        scheduler = three_running()
        youngest = scheduler.running[-1]
        youngest.token_ids.append(77)
        scheduler.retract()
        expect("token_ids of the retracted request", youngest.token_ids, [10, 11, 12, 13, 14, 15, 77])

    def test_nobody_is_let_in_in_the_same_step(self):
        scheduler = three_running()
        for req in scheduler.running:
            req.cached_len, req.device_len = 6, 7
        scheduler.retract()
        expect("uids in the step of the retraction", uids(scheduler.schedule().reqs), [0, 1])
        expect("uids in the step after it", sorted(uids(scheduler.schedule().reqs)), [0, 1, 2])

    def test_retractions_are_counted(self):
        scheduler = three_running()
        scheduler.retract()
        scheduler.retract()
        expect("stats().retracted after two retractions", scheduler.stats().retracted, 2)
