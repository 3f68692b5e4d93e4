"""The lab, chapter 4: continuous batching."""

from collections import deque

import numpy as np
import torch

from stage4_batch.cache import FixedCacheManager
from stage4_batch.page_table import PageTable
from stage4_batch.scheduler import BatchScheduler, admit_waiting, pick_running
from tests.lab.learner import expect, request


def picked(picks) -> list[tuple[int, int]]:
    return [(req.uid, n) for req, n in picks]


def decoding(uid: int, cached: int = 9):
    """A request that needs one position."""
    req = request(cached + 1, uid, max_tokens=50)
    req.cached_len = cached
    return req


def prompt(uid: int, length: int):
    return request(length, uid, max_tokens=50)


class Test_4_1:
    """pick_running"""

    def test_every_decode_gets_its_position_even_beyond_the_budget(self):
        picks = pick_running([decoding(1), decoding(2), decoding(3)], budget=2)
        expect("3 decodes, budget 2: (uid, positions), sorted", sorted(picked(picks)), [(1, 1), (2, 1), (3, 1)])

    def test_a_prompt_gets_what_is_left(self):
        picks = pick_running([prompt(1, 40), decoding(2), decoding(3)], budget=10)
        expect("a prompt of 40 and 2 decodes, budget 10, sorted", sorted(picked(picks)), [(1, 8), (2, 1), (3, 1)])

    def test_the_oldest_prompt_first_and_nothing_for_the_next_when_the_budget_is_gone(self):
        expect(
            "prompts of 6 and 8, budget 10", picked(pick_running([prompt(1, 6), prompt(2, 8)], 10)), [(1, 6), (2, 4)]
        )
        expect("prompts of 12 and 8, budget 10", picked(pick_running([prompt(1, 12), prompt(2, 8)], 10)), [(1, 10)])

    def test_a_request_with_nothing_to_compute_is_left_out(self):
        done = request(4, 1, max_tokens=1)
        done.cached_len, done.device_len = 4, 5
        expect("one that has its last token, and a decode", picked(pick_running([done, decoding(2)], 10)), [(2, 1)])

    def test_decodes_come_before_prompts_the_longest_first(self):
        picks = pick_running([prompt(1, 4), decoding(2, 5), decoding(3, 9)], budget=10)
        expect("a prompt, decodes with 5 and 9 cached: the order", picked(picks), [(3, 1), (2, 1), (1, 4)])


def regions(count: int) -> FixedCacheManager:
    return FixedCacheManager(count, max_len=64, device=torch.device("cpu"))


class Test_4_2:
    """admit_waiting"""

    def test_in_order_of_arrival_while_there_is_room(self):
        waiting, running = deque([prompt(1, 3), prompt(2, 3), prompt(3, 3)]), []
        picks, _ = admit_waiting(waiting, running, regions(2), budget=100)
        expect("3 waiting, 2 regions: (uid, positions)", picked(picks), [(1, 3), (2, 3)])
        expect("uids that run, uids that wait", [[r.uid for r in running], [r.uid for r in waiting]], [[1, 2], [3]])

    def test_the_last_one_gets_a_part_of_its_prompt(self):
        waiting = deque([prompt(1, 6), prompt(2, 6), prompt(3, 6)])
        picks, _ = admit_waiting(waiting, [], regions(8), budget=10)
        expect("prompts of 6, 6, 6, budget 10", picked(picks), [(1, 6), (2, 4)])

    def test_nobody_is_let_in_without_budget(self):
        waiting = deque([prompt(1, 6)])
        picks, _ = admit_waiting(waiting, [], regions(8), budget=0)
        expect("budget 0", picked(picks), [])
        expect("uids that wait", [req.uid for req in waiting], [1])

    def test_nobody_overtakes_the_head_of_the_queue(self):
        cache = regions(8)
        admit, cache.admit = cache.admit, lambda req: req.prompt_len < 5 and admit(req)  # no room for long ones
        waiting = deque([prompt(1, 9), prompt(2, 3)])
        expect("a prompt of 9 without room, then one of 3", picked(admit_waiting(waiting, [], cache, 100)[0]), [])

    def test_it_returns_the_place_of_each_in_the_page_table(self):
        cache, reqs = regions(8), [prompt(1, 3), prompt(2, 3)]
        _, table_idx = admit_waiting(deque(reqs), [], cache, budget=100)
        expect("table_idx of both", table_idx, [cache.table_idx[1], cache.table_idx[2]])

    def test_the_order_may_name_another_first(self):
        waiting = deque([prompt(1, 3), prompt(2, 3), prompt(3, 3)])
        picks, _ = admit_waiting(waiting, [], regions(2), 100, order=lambda waiting: 2)
        expect("order says place 2; two regions", picked(picks), [(3, 3), (1, 3)])


class Test_4_3:
    """slots"""

    def test_in_a_page_of_its_own_a_request_counts_from_the_pages_first_slot(self):
        table = PageTable(2, 1, page_size=64, device=torch.device("cpu"))
        table.write(np.array([0, 1]), np.array([0, 0]), np.array([0, 1], np.int32))
        expect(
            "positions 0, 63, 5 of requests 1, 1, 0",
            table.slots(np.array([1, 1, 0]), np.array([0, 63, 5])),
            [64, 127, 5],
        )

    def test_pages_may_lie_anywhere(self):
        table = PageTable(2, 3, page_size=4, device=torch.device("cpu"))
        table.write(np.zeros(3, np.int64), np.arange(3), np.array([7, 3, 9], np.int32))
        slots = table.slots(np.zeros(4, np.int64), np.array([0, 3, 6, 10]))
        expect("positions 0, 3, 6, 10 in pages 7, 3, 9 of 4 tokens", slots, [28, 31, 14, 38])

    def test_two_requests_at_the_same_position(self):
        table = PageTable(2, 2, page_size=4, device=torch.device("cpu"))
        table.write(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([2, 5, 1, 0], np.int32))
        expect("position 5 of requests 0 and 1", table.slots(np.array([0, 1]), np.array([5, 5])), [21, 1])

    def test_large_pools_need_64_bits(self):
        table = PageTable(1, 1, page_size=2**20, device=torch.device("cpu"))
        table.write(np.array([0]), np.array([0]), np.array([5000], np.int32))
        expect(
            "position 3 in page 5,000 of 2**20 tokens", table.slots(np.array([0]), np.array([3])), [5000 * 2**20 + 3]
        )


def launch(scheduler: BatchScheduler):
    """One step as the engine would drive it, every sampled token being 5; returns (uid, positions) of its requests."""
    step = scheduler.schedule()
    if step is None:
        return None
    picks = [(req.uid, n) for req, n in zip(step.reqs, step.extend_lens.tolist(), strict=True)]
    scheduler.cache.commit(step)
    for req in step.sampled:
        req.device_len += 1
    scheduler.update(step, [5] * len(step.sampled))
    return picks


class Test_4_4:
    """schedule"""

    def test_without_requests_there_is_no_step(self):
        expect("schedule() of an empty scheduler", BatchScheduler(regions(4), budget=8).schedule(), None)

    def test_a_newcomer_joins_those_that_decode(self):
        scheduler = BatchScheduler(regions(4), budget=8)
        scheduler.add(prompt(1, 3))
        expect("the first step", launch(scheduler), [(1, 3)])
        scheduler.add(prompt(2, 4))
        expect("the next one, with a newcomer", launch(scheduler), [(1, 1), (2, 4)])
        expect("and the next", sorted(launch(scheduler)), [(1, 1), (2, 1)])

    def test_a_long_prompt_comes_in_chunks_and_holds_nobody_up(self):
        scheduler = BatchScheduler(regions(4), budget=8)
        scheduler.add(prompt(1, 3))
        launch(scheduler)
        scheduler.add(prompt(2, 16))
        steps = [launch(scheduler) for _ in range(3)]
        expect(
            "a decode beside a prompt of 16, budget 8", steps, [[(1, 1), (2, 7)], [(1, 1), (2, 7)], [(1, 1), (2, 2)]]
        )

    def test_running_requests_come_before_new_ones(self):
        scheduler = BatchScheduler(regions(4), budget=8)
        scheduler.add(prompt(1, 20))
        launch(scheduler)
        scheduler.add(prompt(2, 2))
        expect("a prompt under way uses all of the budget", launch(scheduler), [(1, 8)])
        expect("then what is left goes to the next", launch(scheduler), [(1, 4), (2, 2)])

    def test_each_request_has_its_place_in_the_page_table(self):
        scheduler = BatchScheduler(regions(4), budget=8)
        scheduler.add(prompt(1, 3))
        launch(scheduler)
        scheduler.add(prompt(2, 4))
        step = scheduler.schedule()
        index = scheduler.cache.table_idx
        expect("table_idx of the step's requests 1 and 2", step.table_idx, [index[1], index[2]])
