"""Graphs and overlap change when things happen, never what comes out: padding, static buffers, tokens read a step late.

On the CPU the function that a graph would record is called instead: same buffers, same padding. The tests marked `gpu`
record real graphs.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config import EngineConfig
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine as build_stage5
from stage6_cudagraph.build import build_engine
from stage6_cudagraph.decode_graphs import graph_sizes
from stage6_cudagraph.mixed_graphs import CHUNKS, token_sizes
from tests.histories import History

CUDA = pytest.mark.gpu
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}
LENGTHS, LONGEST = (1, 3, 8, 16, 17, 30), 24


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def texts(llama):
    """(prompt length, kind) -> what stage 2 says."""
    engine, known = build_stage2(llama.config()), {}
    for length in LENGTHS:
        for kind, params in KINDS.items():
            req = engine.generate([llama.prompt(length)], SamplingParams(max_tokens=LONGEST, **params))[0]
            known[length, kind] = req.output_ids
    return known


def small(llama, **changes) -> EngineConfig:
    defaults = {"page_size": 4, "kv_tokens": 72, "max_batch_tokens": 16, "max_running": 5, "max_model_len": 64}
    return llama.config(**defaults | {"graph": True} | changes)


def random_history(engine, llama, texts, rng: random.Random, requests: int) -> None:
    """Random adds and aborts between steps; every request must say what stage 2 says, and nothing be left behind."""
    history = History(engine, rng)
    while requests or engine.has_work():
        if requests and rng.random() < 0.4:
            requests -= 1
            length, kind, n = rng.choice(LENGTHS), rng.choice([*KINDS]), rng.randint(1, LONGEST)

            def params(stop, kind=kind, n=n):
                return SamplingParams(max_tokens=n, stop_token_ids=stop, **KINDS[kind])

            history.add(llama.prompt(length), texts[length, kind], n, 0.5, params)
        history.abort_one(0.06)
        history.step()
    history.check()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize(("page_size", "budget"), [(1, 16), (4, 5), (16, 64)])
def test_random_histories(llama, texts, graph, overlap, page_size, budget):
    config = small(llama, graph=graph, overlap=overlap, page_size=page_size, max_batch_tokens=budget, kv_tokens=80)
    retracted = 0
    for seed in range(3):
        engine = build_engine(config)
        random_history(engine, llama, texts, random.Random(seed), 14)
        retracted += engine.scheduler.num_retracted
    assert retracted


# --- the graph runner -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_sizes(largest, sizes):
    assert graph_sizes(largest) == sizes


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (0, []),
        (5, [5]),
        (16, [16]),
        (100, [16, 32, 64, 100]),
        (1024, [16, 32, 64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024]),
    ],
)
def test_sizes_of_steps_with_prompts(largest, sizes):
    assert token_sizes(largest) == sizes


@pytest.mark.parametrize(("largest", "replays"), [(16, 6), (12, 5), (0, 4)])
def test_what_fits_is_replayed(llama, largest, replays):
    """Three prompts of 8 take two steps, of 16 positions and of 8 and two decodes; four steps of decodes follow."""
    engine = build_engine(small(llama, overlap=False, kv_tokens=400, graph_max_tokens=largest))
    engine.generate([llama.prompt(8)] * 3, SamplingParams(max_tokens=5))
    assert engine.runner.num_replays == replays
    assert engine.stats().steps == 6


def test_more_decodes_than_the_largest_graph_takes_run_eagerly(llama):
    engine = build_engine(small(llama, graph_max_batch=2, max_batch_tokens=64, overlap=False, kv_tokens=400))
    texts = [req.output_ids for req in engine.generate([llama.prompt(8)] * 4, SamplingParams(max_tokens=5))]
    assert engine.runner.num_replays == 1  # of the prompts
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize(("count", "replays"), [(CHUNKS, 2), (CHUNKS + 1, 1)])
def test_as_many_chunks_as_a_graph_takes(llama, texts, count, replays):
    """And one more, which is launched: then only the step of the decodes is replayed."""
    engine = build_engine(small(llama, max_running=count, max_batch_tokens=600, overlap=False, kv_tokens=1600))
    prompts = [(8, 17)[i % 2] for i in range(count)]  # whose sum is no recorded size: there is padding behind them
    reqs = engine.generate([llama.prompt(n) for n in prompts], SamplingParams(max_tokens=2))
    assert engine.runner.num_replays == replays
    assert [req.output_ids for req in reqs] == [texts[n, "greedy"][:2] for n in prompts]


def test_a_step_of_many_decodes_and_a_prompt(llama, texts):
    """With room for few decodes and for many, and a prompt beside them each time."""
    engine = build_engine(small(llama, max_running=24, max_batch_tokens=64, kv_tokens=1600))
    said: dict[int, list[int]] = {}
    while len(said) < 24 or engine.has_work():
        if len(said) < 24:
            said[engine.add(llama.prompt(17), SamplingParams(max_tokens=LONGEST))] = []
        for output in engine.step():
            said[output.uid].append(output.token_id)
    assert engine.runner.num_replays == engine.stats().steps
    assert list(said.values()) == [texts[17, "greedy"]] * 24


def test_padding_keeps_the_pool_finite(llama, monkeypatch):
    """Whatever uninitialised memory holds: it must not go through the layers into the pool's last page."""
    engine = build_engine(small(llama, kv_tokens=160))
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))
    engine.generate([llama.prompt(8)], SamplingParams(max_tokens=2))
    pool = engine.runner.eager.attention.pool
    assert all(layer.isfinite().all() for layer in (*pool.k, *pool.v))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_padding_writes_beyond_all_pages_only(llama, page_size):
    """Three requests run as four rows: rows of the pool that none of them holds must stay as they were."""
    engine = build_engine(small(llama, page_size=page_size, kv_tokens=160))
    pool, cache = engine.runner.eager.attention.pool, engine.cache
    for layer in (*pool.k, *pool.v):
        layer.fill_(7)
    for length in (3, 8, 17):
        engine.add(llama.prompt(length), SamplingParams(max_tokens=20))
    held = set()
    for _ in range(12):
        engine.step()
        pages = np.concatenate(cache.private_pages())
        held |= {int(page) * page_size + i for page in pages for i in range(page_size)}
    assert engine.runner.num_replays
    free = [row for row in range(160) if row not in held]
    assert all((layer[free] == 7).all() for layer in (*pool.k, *pool.v))


# --- overlap ----------------------------------------------------------------------------------------------------


def test_the_host_runs_one_step_ahead(llama):
    engine = build_engine(small(llama))
    engine.add(llama.prompt(3), SamplingParams(max_tokens=3))
    outputs = [engine.step() for _ in range(4)]
    assert [len(step) for step in outputs] == [0, 1, 1, 1]
    assert not engine.has_work()


def test_an_end_by_length_is_foreseen_and_computes_nothing_more(llama):
    engine = build_engine(small(llama))
    engine.generate([llama.prompt(3)], SamplingParams(max_tokens=3))
    assert engine.stats().computed_tokens == 3 + 2


def test_a_stray_token_after_an_unforeseen_end_is_dropped(llama, texts):
    text = texts[8, "greedy"]
    stop = text[4]
    engine = build_engine(small(llama))
    req = engine.generate([llama.prompt(8)], SamplingParams(max_tokens=LONGEST, stop_token_ids={stop}))[0]
    assert req.output_ids == text[: text.index(stop) + 1]
    assert req.finish_reason == "stop_token"
    assert engine.stats().usage == 0


def test_abort_of_a_request_in_flight(llama):
    engine = build_engine(small(llama))
    uid, other = (engine.add(llama.prompt(n), SamplingParams(max_tokens=6)) for n in (3, 8))
    engine.step(), engine.step()
    assert engine.abort(uid)
    rest = [output.uid for _ in range(8) for output in engine.step()]
    assert uid not in rest
    assert rest.count(other) == 5
    assert not engine.has_work()
    assert engine.stats().usage == 0


def test_an_interrupted_generate_leaves_a_usable_engine(llama, texts, monkeypatch):
    """Also when a step is in flight: its tokens belong to nobody any more."""
    engine, calls = build_engine(small(llama)), []
    schedule = engine.scheduler.schedule

    def interrupted():
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([llama.prompt(3)], SamplingParams(max_tokens=20))
    req = engine.generate([llama.prompt(8)], SamplingParams(max_tokens=LONGEST))[0]
    assert req.output_ids == texts[8, "greedy"]
    assert engine.stats().usage == 0


def test_retracted_and_let_in_again_at_once(llama, texts):
    """The same requests as in the step under way, with one new position each: but that is not their newest one."""
    engine = build_engine(small(llama, max_batch_tokens=1))
    engine.add(llama.prompt(8), SamplingParams(max_tokens=LONGEST))
    said = [output.token_id for _ in range(12) for output in engine.step()]
    assert 0 < len(said) < LONGEST
    engine.scheduler.retract()
    while engine.has_work():
        said += [output.token_id for output in engine.step()]
    assert said == texts[8, "greedy"]


def test_tokens_are_read_after_their_copy_has_run(llama, texts):
    """As on a GPU, where the copy arrives only when it is waited for: before that its memory holds anything."""

    class Copy:
        def __init__(self, source, target):
            self.source, self.target = source.clone(), target.fill_(-1)

        def synchronize(self):
            self.target.copy_(self.source)

    engine = build_engine(small(llama))
    send = engine.send

    def send_slowly(batch):
        step = send(batch)
        step.copied = Copy(step.samples.tokens, step.on_host.tokens)
        return step

    engine.send = send_slowly
    reqs = engine.generate([llama.prompt(8), llama.prompt(16)], SamplingParams(max_tokens=LONGEST))
    assert [req.output_ids for req in reqs] == [texts[8, "greedy"], texts[16, "greedy"]]


def test_penalties_see_the_whole_text(llama):
    """The penalty on a token must hold in the very next step."""
    params = SamplingParams(max_tokens=20, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={3: 10.0})
    want = build_stage2(llama.config()).generate([llama.prompt(8)], params)[0].output_ids
    assert build_engine(small(llama)).generate([llama.prompt(8)], params)[0].output_ids == want
    assert len(set(want)) > 1


def test_logprobs_under_overlap(llama):
    params = SamplingParams(max_tokens=6, logprobs=2, temperature=0.7, seed=3)
    want, got = (build(small(llama)).generate([llama.prompt(8)], params)[0] for build in (build_stage5, build_engine))
    assert [entry.top[0][0] for entry in got.logprobs] == [entry.top[0][0] for entry in want.logprobs]
    assert [entry.chosen for entry in got.logprobs] == pytest.approx(
        [entry.chosen for entry in want.logprobs], abs=1e-4
    )


# --- on a GPU ---------------------------------------------------------------------------------------------------


@CUDA
@pytest.mark.parametrize("attn", ["portable", "triton"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_gpu_graphs_and_overlap_say_what_stage_2_says(llama, texts, attn, page_size):
    config = small(llama, device="cuda", attn=attn, page_size=page_size, kv_tokens=max(80, page_size), overlap=True)
    for seed in range(2):
        random_history(build_engine(config), llama, texts, random.Random(seed), 14)


@CUDA
def test_gpu_a_thousand_steps(llama, texts):
    engine = build_engine(small(llama, device="cuda", page_size=1, kv_tokens=80, max_running=8))
    seed = 0
    while engine.stats().steps < 1000:
        random_history(engine, llama, texts, random.Random(seed := seed + 1), 30)
    assert engine.scheduler.num_retracted
    assert engine.runner.num_replays


@CUDA
@pytest.mark.parametrize("page_size", [1, 16])
def test_gpu_steps_of_many_prompts(llama, texts, page_size):
    """Large recorded steps, in which the prefill kernel's programs have to search for their sequences."""
    sizes = {"page_size": page_size, "kv_tokens": 400, "max_batch_tokens": 256, "max_running": 16}
    for seed in range(2):
        random_history(build_engine(small(llama, device="cuda", **sizes)), llama, texts, random.Random(seed), 40)


@CUDA
@pytest.mark.parametrize("newcomers", [0, 3])
def test_gpu_bf16_graph_is_the_eager_step(newcomers):
    """The same step from a graph and kernel by kernel: equal logits within bfloat16's rounding."""
    config = EngineConfig("dummy:tiny", device="cuda", kv_tokens=4096, max_running=16, overlap=False)
    prompts, later = ([[i + 1] * n for i, n in enumerate(lengths)] for lengths in (range(10, 15), (20, 120, 220)))
    logits = same_step(config, prompts, later[:newcomers])
    torch.testing.assert_close(*logits, rtol=2e-2, atol=2e-2)


@CUDA
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize(("attn", "page_size"), [("triton", 1), ("flash", 256)])
def test_gpu_bf16_graph_of_a_deep_model(attn, page_size, chunks):
    """Random prompts, for equal tokens have equal keys; and chunks with context, of what is left of a long prompt."""
    if attn == "flash":
        pytest.importorskip("flash_attn")
    sizes = {"kv_tokens": 4096, "max_running": 16, "page_size": page_size, "max_batch_tokens": 320}
    config, rng = EngineConfig("dummy:smollm2-135m", device="cuda", attn=attn, overlap=False, **sizes), random.Random(0)
    lengths = (20, 30, 40, 50, *((400, 60) if chunks else ()))
    logits = same_step(config, [rng.choices(range(10000), k=length) for length in lengths])
    assert torch.cosine_similarity(*logits).min() > 0.99


def same_step(config: EngineConfig, prompts: list[list[int]], newcomers: list[list[int]] = ()) -> list[torch.Tensor]:
    """Logits of the second step, without graphs and with them; newcomers arrive after the first."""
    logits = []
    for graph in (False, True):
        engine = build_engine(replace(config, graph=graph))
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
        engine.step()
        for prompt in newcomers:
            engine.add(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
        batch = engine.scheduler.schedule()
        batch.input_ids = engine.input_ids(batch)
        with torch.inference_mode():
            logits.append(engine.runner.run(batch).float().clone())
    return logits


@CUDA
def test_gpu_a_step_never_waits():
    """Scheduling and enqueuing must not synchronise; only reading the step before may wait, and it waits for an event.

    Decodes and, now and then, a prompt beside them.
    """
    config = EngineConfig("dummy:tiny", device="cuda", kv_tokens=4096, max_running=16)
    engine = build_engine(config)
    for i in range(5):
        engine.add([i + 1] * 10, SamplingParams(temperature=0.6, max_tokens=100, ignore_eos=True))
    for _ in range(10):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(30):
            if i % 10 == 5:
                engine.add([i + 1] * 40, SamplingParams(temperature=0.6, max_tokens=100, ignore_eos=True))
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
