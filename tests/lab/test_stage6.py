"""The lab, chapter 6: tokens that stay on the device, overlap, padded sizes."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from common.checkpoint import load_config
from stage2_req.params import SamplingParams
from stage4_batch.cache import FixedCacheManager
from stage4_batch.scheduler import BatchScheduler
from stage6_cudagraph.graph_runner import DecodeGraphs, DecodeInputs, graph_sizes
from stage6_cudagraph.overlap import UNSEEN, FutureMap, OverlapEngine
from tests.lab.learner import batch, expect, request


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


class Test_6_1:
    """resolve and store"""

    def test_known_tokens_stay_as_they_are(self):
        futures = FutureMap(4, torch.device("cpu"))
        futures.store(ids(0, 1), ids(70, 71))
        expect("resolve([5, 6]) of requests 0 and 1", futures.resolve(ids(5, 6), ids(0, 1)), [5, 6])

    def test_an_unseen_token_is_the_one_that_was_stored_for_this_request(self):
        futures = FutureMap(4, torch.device("cpu"))
        futures.store(ids(3, 1), ids(73, 71))
        expect(
            "resolve([UNSEEN, 5, UNSEEN]) of 1, 2, 3",
            futures.resolve(ids(UNSEEN, 5, UNSEEN), ids(1, 2, 3)),
            [71, 5, 73],
        )

    def test_the_newest_token_counts_and_others_stay(self):
        futures = FutureMap(4, torch.device("cpu"))
        futures.store(ids(0, 2), ids(70, 72))
        futures.store(ids(2), ids(99))
        expect("resolve of 0 and 2, 2 stored again", futures.resolve(ids(UNSEEN, UNSEEN), ids(0, 2)), [70, 99])

    def test_padding_goes_to_the_spare_entry(self):
        futures = FutureMap(2, torch.device("cpu"))
        futures.store(ids(0, 1), ids(70, 71))
        futures.store(ids(0, -1, -1), ids(80, 5, 6))
        expect("resolve of 0 and 1 after padding was stored", futures.resolve(ids(UNSEEN, UNSEEN), ids(0, 1)), [80, 71])


class Device:
    """A runner that notes when a step is launched, and when its tokens are read. Every token is 5."""

    def __init__(self):
        self.events, self.steps = [], 0

    def forward(self, step):
        number, self.steps = self.steps, self.steps + 1
        self.events.append(f"launch {number}")
        return SimpleNamespace(to_host=partial(self.read, number, len(step.sampled)))

    def read(self, number: int, count: int):
        self.events.append(f"read {number}")
        return [5] * count, None


def overlapping(**params) -> tuple[OverlapEngine, Device]:
    """An engine with one request of 3 prompt tokens and 3 tokens to come."""
    cache, device = FixedCacheManager(4, 64, torch.device("cpu")), Device()
    engine = OverlapEngine(load_config("dummy:tiny")[0], BatchScheduler(cache, 16), cache, device, torch.device("cpu"))
    engine.add([1, 2, 3], SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | params))
    return engine, device


class Test_6_2:
    """step"""

    def test_a_step_returns_the_tokens_of_the_step_before(self):
        engine, _ = overlapping()
        expect("tokens of the first three steps", [len(engine.step()) for _ in range(3)], [0, 1, 1])

    def test_the_next_step_is_launched_before_tokens_are_read(self):
        engine, device = overlapping()
        for _ in range(3):
            engine.step()
        expect("what happened, in order", device.events, ["launch 0", "launch 1", "read 0", "launch 2", "read 1"])

    def test_the_last_step_is_collected_too(self):
        engine, _ = overlapping()
        tokens = [output.token_id for _ in range(6) for output in engine.step()]
        expect("tokens after 6 steps, 3 asked for", tokens, [5, 5, 5])
        expect("has_work()", engine.has_work(), False)

    def test_penalties_wait_for_the_text(self):
        engine, device = overlapping(presence_penalty=1.0)
        engine.step()
        engine.step()
        expect("what happened, in order", device.events, ["launch 0", "read 0", "launch 1"])

    def test_every_step_is_read_once(self):
        engine, device = overlapping()
        for _ in range(6):
            engine.step()
        reads = [event for event in device.events if event.startswith("read")]
        expect("reads of 3 steps", reads, ["read 0", "read 1", "read 2"])


class Test_6_3:
    """graph_sizes"""

    def test_small_batches_have_little_padding(self):
        expect("graph_sizes(8)", graph_sizes(8), [1, 2, 4, 8])

    def test_then_multiples_of_8(self):
        expect("graph_sizes(32)", graph_sizes(32), [1, 2, 4, 8, 16, 24, 32])

    def test_the_largest_is_always_there_and_none_is_larger(self):
        expect("graph_sizes(20)", graph_sizes(20), [1, 2, 4, 8, 16, 20])
        expect("graph_sizes(3)", graph_sizes(3), [1, 2, 3])
        expect("graph_sizes(1)", graph_sizes(1), [1])


def decode_graphs() -> tuple[DecodeGraphs, list]:
    """Graphs for up to 8 requests whose replays do nothing but note their size; request i of any of them gets token 100 + i."""
    replayed = []
    capturer = SimpleNamespace(capture=lambda what, function, sizes: {n: partial(replayed.append, n) for n in sizes})
    sample = lambda hidden, step: f"sampled from {len(hidden)} hidden states"  # noqa: E731
    graphs = DecodeGraphs(SimpleNamespace(device=torch.device("cpu"), sample=sample), capturer, 8)
    for n in graph_sizes(8):
        graphs.outputs[n] = torch.zeros(n, 4), torch.arange(100, 100 + n)
    return graphs, replayed


def decodes(*table_idx: int, **params):
    """A step of one decode for each index: position 4, its token is 14."""
    reqs = [request(5, uid, max_tokens=9, **params) for uid in range(len(table_idx))]
    for req in reqs:
        req.cached_len = 4
    return batch(*((req, 1) for req in reqs), table_idx=table_idx)


class Test_6_4:
    """fill"""

    def test_the_batch_comes_first_then_padding(self):
        graphs, _ = decode_graphs()
        graphs.fill(decodes(3, 5), 4, True)
        inputs = DecodeInputs(*graphs.buffer(4))
        expect("table_idx of 2 requests at size 4", inputs.table_idx, [3, 5, -1, -1])
        expect("positions", inputs.positions, [4, 4, 0, 0])
        expect("input_ids of the two", inputs.input_ids[:2], [14, 14])

    def test_nothing_of_the_step_before_stays(self):
        graphs, _ = decode_graphs()
        graphs.fill(decodes(3, 5, 6, 7), 4, True)
        graphs.fill(decodes(2), 4, True)
        inputs = DecodeInputs(*graphs.buffer(4))
        expect("table_idx of 1 request after a step of 4", inputs.table_idx, [2, -1, -1, -1])
        expect("positions", inputs.positions, [4, 0, 0, 0])

    def test_a_token_that_the_host_has_not_seen_is_marked(self):
        graphs, _ = decode_graphs()
        req = request(5, max_tokens=9)
        req.cached_len, req.device_len = 5, 6  # position 5 was sampled, and its token is on the device only
        graphs.fill(batch((req, 1)), 1, True)
        expect("input_ids", DecodeInputs(*graphs.buffer(1)).input_ids, [UNSEEN])

    def test_temperatures_travel_as_the_bits_of_floats(self):
        graphs, _ = decode_graphs()
        graphs.fill(decodes(3, temperature=0.5), 1, True)
        inputs = DecodeInputs(*graphs.buffer(1))
        expect("inv_temperature at temperature 0.5, read as float32", inputs.inv_temperature.view(torch.float32), [2.0])
        expect("is there a key for the noise?", bool(inputs.key_low.any() or inputs.key_high.any()), True)

    def test_the_buffers_stay_where_they_are(self):
        graphs, _ = decode_graphs()
        before = graphs.buffer(2).data_ptr()
        graphs.fill(decodes(3, 5), 2, True)
        expect(
            "does the buffer have its address still, and the new content?",
            (graphs.buffer(2).data_ptr() == before, np.any(graphs.buffer(2).numpy() == 5).item()),
            (True, True),
        )


class Test_6_5:
    """DecodeGraphs.forward"""

    def test_the_smallest_graph_that_is_large_enough(self):
        graphs, replayed = decode_graphs()
        for step in (decodes(0, 1, 2), decodes(0), decodes(0, 1, 2, 3, 4)):
            graphs.forward(step)
        expect("sizes replayed for 3, 1 and 5 requests", replayed, [4, 1, 8])

    def test_a_batch_that_fits_exactly_needs_no_padding(self):
        graphs, replayed = decode_graphs()
        graphs.forward(decodes(0, 1, 2, 3))
        expect("sizes replayed for 4 requests", replayed, [4])

    def test_tokens_of_padding_are_thrown_away(self):
        graphs, _ = decode_graphs()
        expect("tokens of 3 requests", graphs.forward(decodes(0, 1, 2)).tokens, [100, 101, 102])

    def test_what_the_graph_can_not_sample_is_sampled_from_its_hidden_states(self):
        graphs, _ = decode_graphs()
        filtering = decodes(0, 1, 2, temperature=1.0, top_k=5)
        expect("forward of 3 requests with top_k", graphs.forward(filtering), "sampled from 3 hidden states")
