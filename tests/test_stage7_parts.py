"""Around the tree: the order of the waiting queue, the workloads, the drawing, and what the flags refuse."""

import io
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from rich.console import Console

from common import workload
from common.config import EngineConfig, UserError
from stage2_req.params import SamplingParams
from stage7_radix.build import build_engine
from stage7_radix.order import PATIENCE, WINDOW
from stage7_radix.radix_tree import RadixTree
from stage7_radix.run import converse, hit_rate
from stage7_radix.show import drawing
from tests.conftest import reference


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


# --- longest prefix first ---------------------------------------------------------------------------------------


def one_at_a_time(llama, order: str):
    config = llama.config(order=order, page_size=4, kv_tokens=200, max_running=1, max_model_len=80, overlap=False)
    return build_engine(config)


def served(engine) -> list[int]:
    """Uids in the order of their first tokens."""
    order = []
    while engine.has_work():
        order += [output.uid for output in engine.step() if output.uid not in order]
        engine.cache.check_integrity()
    return order


@pytest.mark.parametrize(("order", "expected"), [("fcfs", [1, 2, 3, 4]), ("prefix", [3, 4, 1, 2])])
def test_the_request_that_shares_most_goes_first(llama, order, expected):
    """Longest first; of equals the one that has waited longest."""
    engine = one_at_a_time(llama, order)
    known = llama.prompt(40)
    engine.generate([known], SamplingParams(max_tokens=1))
    for prompt in (llama.prompt(9), llama.prompt(8), known + llama.prompt(3), known[:20] + llama.prompt(3)):
        engine.add(prompt, SamplingParams(max_tokens=2))
    assert served(engine) == expected


def test_no_request_is_overtaken_for_ever(llama):
    """A stream of requests on a known prefix, and two that share with no other."""
    engine = one_at_a_time(llama, "prefix")
    known, draw = llama.prompt(40), random.Random(0)
    engine.generate([known], SamplingParams(max_tokens=1))
    strangers = [engine.add(llama.prompt(30, seed), SamplingParams(max_tokens=2)) for seed in (1, 2)]
    sharers = [engine.add([*known, draw.randrange(96)], SamplingParams(max_tokens=2)) for _ in range(3 * PATIENCE)]
    order = served(engine)
    assert [uid for uid in order if uid in sharers] == sharers
    places = [order.index(uid) for uid in strangers]
    assert places == [PATIENCE, PATIENCE + 1]


def test_only_the_head_of_the_queue_is_looked_at(llama):
    engine = one_at_a_time(llama, "prefix")
    known = llama.prompt(40)
    engine.generate([known], SamplingParams(max_tokens=1))
    strangers = [engine.add(llama.prompt(5, seed), SamplingParams(max_tokens=1)) for seed in range(WINDOW)]
    late = engine.add(known, SamplingParams(max_tokens=1))
    assert served(engine)[:2] == [strangers[0], late]


def test_with_more_prefixes_than_memory_the_order_decides_who_hits(llama):
    """Four prefixes in turns, room for one and a half: first come, first served evicts each before it is used again."""
    hits = {}
    prompts = [llama.prompt(60, i % 4) + llama.prompt(4, 10 + i) for i in range(16)]
    for order in ("fcfs", "prefix"):
        config = llama.config(order=order, page_size=4, kv_tokens=100, max_running=1, max_model_len=80)
        reqs = build_engine(config).generate(prompts, SamplingParams(max_tokens=3))
        assert [req.output_ids for req in reqs] == [reference(llama, prompt, 3) for prompt in prompts]
        hits[order] = sum(req.cached_tokens for req in reqs)
    assert hits["fcfs"] == 0
    assert hits["prefix"] > 10 * 60


@pytest.mark.parametrize(("changes", "message"), [
    ({"order": "lifo"}, "order 'lifo' is unknown; use fcfs or prefix"),
    ({"order": "prefix", "radix": False}, "order prefix needs the prefix cache; leave out --no-radix"),
])  # fmt: skip
def test_what_the_flags_refuse(changes, message):
    with pytest.raises(UserError, match=message):
        EngineConfig(**changes)


# --- workloads --------------------------------------------------------------------------------------------------


def test_the_offline_workload_has_the_published_size():
    items = workload.offline()
    assert (len(items), sum(len(item.prompt_ids) for item in items)) == (256, 142827)
    assert sum(item.max_tokens for item in items) == 133966


def test_shared_prefix():
    items = workload.shared_prefix(3, 4, 20, 5, 7, vocab_size=50)
    assert [(len(item.prompt_ids), item.max_tokens) for item in items] == [(25, 7)] * 12
    groups = Counter(tuple(item.prompt_ids[:20]) for item in items)
    assert list(groups.values()) == [4] * 3
    assert len({tuple(item.prompt_ids) for item in items}) == 12
    assert [tuple(item.prompt_ids[:20]) for item in items] != sorted(groups.elements(), key=list(groups).index)
    assert all(0 <= token < 50 for item in items for token in item.prompt_ids)
    assert items == workload.shared_prefix(3, 4, 20, 5, 7, vocab_size=50)
    assert items != workload.shared_prefix(3, 4, 20, 5, 7, vocab_size=50, seed=1)


def test_multi_turn(llama):
    todo = workload.multi_turn(3, 4, 10, 6, 5, vocab_size=96, seed=2)
    assert [[len(item.prompt_ids) for item in turns] for turns in todo] == [[10, 6, 6, 6]] * 3
    engine = build_engine(llama.config(page_size=1, kv_tokens=1000, max_model_len=100))
    reqs = converse(engine, 3, 4, 10, 6, 5)
    assert [req.prompt_len for req in reqs] == [n for n in (10, 21, 32, 43) for _ in range(3)]
    assert reqs[3].token_ids[:21] == reqs[0].token_ids + todo[0][1].prompt_ids
    assert [req.output_ids for req in reqs] == [reference(llama, req.token_ids[: req.prompt_len], 5) for req in reqs]
    known = 3 * (14 + 25 + 36)  # all that was computed before: an answer's last token has no slot
    assert hit_rate(reqs) == pytest.approx(100 * known / (3 * (10 + 21 + 32 + 43)), abs=0.1)


def test_online_arrivals():
    times = workload.online(20000, rate=4.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(1 / 2.718, rel=0.05)  # no memory
    assert times[:5] == workload.online(5, rate=4.0)
    assert times[:5] != workload.online(5, rate=4.0, seed=1)


# --- the picture ------------------------------------------------------------------------------------------------


def test_the_drawing_shows_text_holders_and_age():
    tree = RadixTree(1)
    node, _ = tree.insert([1, 2, 3, 4], range_pages(4))
    tree.insert([1, 2, 7], range_pages(3), "")
    tree.insert([5, 6], range_pages(2), "[tenant]")
    tree.lock(node)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(drawing(tree, lambda ids: " ".join("abcdefgh"[i] for i in ids)))
    lines = console.export_text().splitlines()
    assert "7 pages of 1, 4 of them locked" in lines[0]
    shown = sorted(line.split("'", 1)[1] for line in lines[1:])
    assert shown == [
        "b c' 2 tokens, held by 1, used 1 calls ago",
        "d e' 2 tokens, held by 1, used 2 calls ago",
        "f g' salt [tenant] 2 tokens, held by 0, used 0 calls ago",
        "h' 1 tokens, held by 0, used 1 calls ago",
    ]


def test_the_drawing_cuts_long_texts_in_the_middle():
    tree = RadixTree(1)
    tree.insert([0] * 50, range_pages(50))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(drawing(tree, lambda ids: "start" + "x" * 100 + "end", width=10))
    assert "'start … xxend'" in console.export_text()


def range_pages(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)
