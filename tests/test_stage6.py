"""Graphs and overlap change when things happen, never what comes out: padding, static buffers, tokens read a step late.

On the CPU the function that a graph would capture is called instead: same buffers, same padding. The tests marked `gpu`
capture real graphs.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config import EngineConfig
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req, Samples
from stage2_req.sampling import noise_keys
from stage5_paged.build import build_engine as build_stage5
from stage6_cudagraph.build import build_engine
from stage6_cudagraph.graph_runner import DecodeInputs, graph_sizes
from stage6_cudagraph.mixed_graphs import FEW_CHUNKS, MixedInputs, Shape, array_sizes, token_sizes
from stage6_cudagraph.overlap import UNSEEN, FutureMap, HostSamples, known_ids
from tests.histories import History

CPU = torch.device("cpu")
CUDA = pytest.mark.gpu
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "filtered": {"temperature": 1.2, "seed": 7, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}
LENGTHS, LONGEST = (1, 3, 8, 16, 17, 30), 24


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def texts(llama):
    """(prompt length, kind) -> stage 2's text."""
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
    """Random adds and aborts between steps; every text must be stage 2's, and nothing be left behind."""
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


@pytest.mark.parametrize("count", [FEW_CHUNKS, FEW_CHUNKS + 1, 40])
def test_steps_of_few_and_of_many_chunks(llama, texts, count):
    """More chunks than the usual graphs have room for are replayed, too, from those with room for all."""
    engine = build_engine(small(llama, max_running=count, max_batch_tokens=600, overlap=False, kv_tokens=1600))
    prompts = [(8, 17)[i % 2] for i in range(count)]  # whose sum is no captured size: there is padding behind them
    reqs = engine.generate([llama.prompt(n) for n in prompts], SamplingParams(max_tokens=2))
    assert engine.runner.num_replays == 2
    assert [req.output_ids for req in reqs] == [texts[n, "greedy"][:2] for n in prompts]


def test_a_step_of_many_decodes_and_a_prompt(llama, texts):
    """With room for few decodes and for many, and a prompt beside them each time."""
    engine = build_engine(small(llama, max_running=24, max_batch_tokens=64, kv_tokens=1600))
    seen: dict[int, list[int]] = {}
    while len(seen) < 24 or engine.has_work():
        if len(seen) < 24:
            seen[engine.add(llama.prompt(17), SamplingParams(max_tokens=LONGEST))] = []
        for output in engine.step():
            seen[output.uid].append(output.token_id)
    assert engine.runner.num_replays == engine.stats().steps
    assert list(seen.values()) == [texts[17, "greedy"]] * 24


def test_padding_keeps_the_pool_finite(llama, monkeypatch):
    """Whatever uninitialised memory holds: it must not go through the layers into the pool's last page."""
    engine = build_engine(small(llama, kv_tokens=160))
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))
    engine.generate([llama.prompt(8)], SamplingParams(max_tokens=2))
    pool = engine.runner.eager.attention.pool
    assert all(layer.isfinite().all() for layer in (*pool.k, *pool.v))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_padding_writes_beyond_all_pages_only(llama, page_size):
    """Three requests run in a graph for four: slots of the pool that none of them holds must stay as they were."""
    engine = build_engine(small(llama, page_size=page_size, kv_tokens=160))
    pool, cache = engine.runner.eager.attention.pool, engine.cache
    for layer in (*pool.k, *pool.v):
        layer.fill_(7)
    for length in (3, 8, 17):
        engine.add(llama.prompt(length), SamplingParams(max_tokens=20))
    held = set()
    for _ in range(12):
        engine.step()
        pages = np.concatenate(cache.owned_pages())
        held |= {int(page) * page_size + i for page in pages for i in range(page_size)}
    assert engine.runner.num_replays
    free = [slot for slot in range(160) if slot not in held]
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
    """Also when a step is in flight: its tokens belong to no request any more."""
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


def test_retracted_while_a_step_is_under_way(llama, texts):
    """The token of that step comes first; then the request is let in again, and all that it computes is known."""
    engine = build_engine(small(llama, max_batch_tokens=1))
    engine.add(llama.prompt(8), SamplingParams(max_tokens=LONGEST))
    text = [output.token_id for _ in range(12) for output in engine.step()]
    assert 0 < len(text) < LONGEST
    engine.scheduler.retract()
    computed = engine.stats().computed_tokens
    (output,) = engine.step()
    text.append(output.token_id)
    assert engine.stats().computed_tokens == computed
    while engine.has_work():
        text += [output.token_id for output in engine.step()]
    assert text == texts[8, "greedy"]


def test_tokens_are_read_after_their_copy_has_run(llama, texts, monkeypatch):
    """As on a GPU, where the copy arrives only when it is waited for: before that its memory holds anything."""

    class SlowCopy:
        def __init__(self, target):
            self.source, self.target = target.clone(), target.fill_(-1)

        @torch.inference_mode()
        def synchronize(self):
            self.target.copy_(self.source)

    copy = HostSamples.copy

    def copy_slowly(samples):
        step = copy(samples)
        step.copied = SlowCopy(step.tokens)
        return step

    monkeypatch.setattr(HostSamples, "copy", copy_slowly)
    for graph in (False, True):
        engine = build_engine(small(llama, graph=graph))
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


# --- tokens that the host has not seen --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_future_map_gives_what_was_stored(kind):
    futures, everywhere = FutureMap(3, CPU), torch.arange(3, dtype=kind)
    futures.store(torch.tensor([2, 0], dtype=kind), torch.tensor([7, 9]))
    ids = torch.tensor([UNSEEN, 4, UNSEEN, 5, UNSEEN], dtype=kind)
    resolved = futures.resolve(ids, torch.tensor([0, 0, 2, 1, 0], dtype=kind))
    assert resolved.dtype == torch.int64
    assert resolved.tolist() == [9, 4, 7, 5, 9]
    futures.store(torch.tensor([1], dtype=kind), torch.tensor([8]))
    futures.store(torch.tensor([2], dtype=kind), torch.tensor([6]))  # a later token in place of the first
    assert futures.resolve(torch.full_like(everywhere, UNSEEN), everywhere).tolist() == [9, 8, 6]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_padding_has_a_place_of_its_own_in_the_future_map(kind):
    futures, everywhere = FutureMap(3, CPU), torch.arange(3, dtype=kind)
    futures.store(everywhere, torch.tensor([7, 8, 9]))
    futures.store(torch.tensor([-1, 1, -1], dtype=kind), torch.tensor([1, 2, 3]))
    assert futures.resolve(torch.full_like(everywhere, UNSEEN), everywhere).tolist() == [7, 2, 9]
    assert futures.resolve(torch.tensor([0, UNSEEN], dtype=kind), torch.tensor([-1, 2], dtype=kind)).tolist() == [0, 9]


def make_req(uid: int, ids: list[int], cached_len: int = 0, unseen: int = 0, **params) -> Req:
    """A request with `cached_len` cached positions, and `unseen` tokens that are on the device only."""
    req = Req(uid, ids, SamplingParams(**{"max_tokens": 1000} | params), uid, 1000, frozenset())
    req.cached_len, req.device_len = cached_len, len(ids) + unseen
    return req


@pytest.mark.parametrize(
    ("n", "ids"), [(1, [7]), (2, [7, 8]), (3, [7, 8, 9]), (4, [7, 8, 9, UNSEEN])], ids=["1", "2", "3", "all"]
)
def test_only_the_newest_token_can_be_unseen(n, ids):
    """Also of several new positions, as after a retraction."""
    seen, unseen = make_req(0, [1, 2, 3], 1), make_req(1, [5, 6, 7, 8, 9], 2, unseen=1)
    assert known_ids(Batch.build([(unseen, n)], [0])).tolist() == ids
    both = known_ids(Batch.build([(seen, 2), (unseen, n)], [0, 1])).tolist()
    assert both == ([*ids, 2, 3] if n == 1 else [2, 3, *ids])  # decodes first


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_two_overlapped_steps(llama, texts, graph):
    """The second step is launched before the host has seen a token of the first, and the third before it has seen one of
    the second. What the model gets are the tokens all the same.
    """
    engine, on_host, in_model = build_engine(small(llama, graph=graph, max_batch_tokens=64)), [], []
    launch, model = engine.launch, engine.runner.eager.model if graph else engine.runner.model

    def look(batch):
        on_host.append(known_ids(batch).tolist())
        return launch(batch)

    engine.launch = look
    model.register_forward_pre_hook(lambda _, args: in_model.append(args[0].tolist()))
    uids = [engine.add(llama.prompt(n), SamplingParams(max_tokens=4)) for n in (8, 3)]
    outputs = [[(output.uid, output.token_id) for output in engine.step()] for _ in range(5)]
    first, second = texts[8, "greedy"], texts[3, "greedy"]
    assert on_host == [llama.prompt(8) + llama.prompt(3)] + 3 * [[UNSEEN, UNSEEN]]
    assert [ids[:2] for ids in in_model[1:]] == [[first[i], second[i]] for i in range(3)]
    assert in_model[0][:11] == llama.prompt(8) + llama.prompt(3)
    assert outputs == [[], *([(uids[0], first[i]), (uids[1], second[i])] for i in range(4))]
    assert not engine.has_work()


def test_samples_on_the_host_do_not_change_with_the_devices_memory():
    """A replay overwrites the static buffers, perhaps before the host has read the step before."""
    buffers = torch.tensor([5, 6, 7, 0]), torch.tensor([0.5, 0.25]), torch.ones(2, 3), torch.ones(2, 3, dtype=int)
    plain = HostSamples.copy(Samples(buffers[0][:3]))
    with_logprobs = HostSamples.copy(Samples(buffers[0][:2], buffers[1:]))
    for buffer in buffers:
        buffer.fill_(9)
    assert plain.to_host() == ([5, 6, 7], None, None)
    tokens, entries, _ = with_logprobs.to_host()
    assert tokens == [5, 6]
    assert entries == [(0.5, [(1, 1.0)] * 3), (0.25, [(1, 1.0)] * 3)]


# --- static buffers ---------------------------------------------------------------------------------------------


def bits(*numbers: float) -> list[int]:
    """Of float32, as the int32 that the buffers hold."""
    return np.array(numbers, np.float32).view(np.int32).tolist()


def test_the_inputs_of_a_step_of_decodes(llama):
    engine = build_engine(small(llama, max_running=9, overlap=False))
    decode, _ = engine.runner.graphs
    reqs = [make_req(0, [4, 5, 6], 2), make_req(1, [7, 8], 2, unseen=1, temperature=0.5), make_req(2, [3], 0)]
    batch = Batch.build([(req, 1) for req in reqs], [6, 0, 3])
    low, high = noise_keys(reqs).tolist()
    decode.buffer(8).fill_(77)  # of an earlier, larger step
    for plain in (True, False):
        decode.fill(batch, 4, plain)
        fields = {name: x.tolist() for name, x in vars(DecodeInputs(*decode.buffer(4))).items()}
        assert fields == {
            "input_ids": [6, UNSEEN, 3, 0],
            "positions": [2, 2, 0, 0],
            "table_idx": [6, 0, 3, -1],
            "inv_temperature": bits(0, 2, 0, 0) if plain else [0] * 4,
            "key_low": [*low, 0] if plain else [0] * 4,
            "key_high": [*high, 0] if plain else [0] * 4,
        }


def test_the_inputs_of_a_step_with_prompts():
    """Two decodes, one of them unseen; a chunk in the middle of its prompt, and the whole of another. All computed by hand."""
    reqs = [
        make_req(0, [10, 11, 12, 13, 14, 15, 16, 17], 4),  # 3 of its 4 positions
        make_req(1, [20, 21, 22, 23, 24, 25, 26], 7, unseen=1),
        make_req(2, [30, 31, 32, 33, 34], 0, temperature=0.5),
        make_req(3, [40, 41, 42], 2, temperature=4.0),
    ]
    picks, sizes = (
        [(reqs[0], 3), (reqs[1], 1), (reqs[2], 5), (reqs[3], 1)],
        array_sizes(Shape(tokens=16, decodes=4, chunks=8)),
    )
    batch = Batch.build(picks, [1, 5, 8, 3])
    host = np.zeros(sum(sizes), np.int32)
    MixedInputs.carve(host, sizes).fill(batch, np.arange(100, 110), padding_slot=999)
    low, high = noise_keys([reqs[1], reqs[3], reqs[2]]).tolist()
    unused = 8 - 2  # chunks, and samples but for those of two decodes that are not there
    expected = {
        "input_ids": [UNSEEN, 42, 14, 15, 16, 30, 31, 32, 33, 34, *[0] * 6],
        "positions": [7, 2, 4, 5, 6, 0, 1, 2, 3, 4, *[0] * 6],
        "out_loc": [*range(100, 110), *[999] * 6],
        "decode_table_idx": [5, 3, 0, 0],
        "cache_seqlens": [8, 3, 0, 0],
        "chunk_table_idx": [0, 1, 8, *[0] * unused, 0],
        "cu_seqlens_q": [0, 2, 5, 10, *[10] * unused, 16],
        "cu_seqlens_k": [0, 0, 7, 12, *[12] * unused, 12],
        "last_indices": [0, 1, 9, *[0] * (unused + 3)],
        "sample_table_idx": [5, 3, 8, *[-1] * (unused + 3)],
        "inv_temperature": [*bits(0, 0.25, 2), *[0] * (unused + 3)],
        "key_low": [*low, *[0] * (unused + 3)],
        "key_high": [*high, *[0] * (unused + 3)],
    }
    for memory in (host, torch.from_numpy(host)):
        inputs = MixedInputs.carve(memory, sizes)
        assert {name: x.tolist() for name, x in vars(inputs).items()} == expected


# --- on a GPU ---------------------------------------------------------------------------------------------------


@CUDA
@pytest.mark.parametrize("attn", ["portable", "triton"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_gpu_texts_of_graphs_and_overlap_are_stage_2s(llama, texts, attn, page_size):
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
    """Large captured steps, in which the prefill kernel's programs have to search for their sequences."""
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


class KeepLogits:
    """A sampler that also keeps the logits of each step that come to it, on the host."""

    def __init__(self, sampler, kept: list[torch.Tensor]):
        self.sampler, self.kept = sampler, kept

    def __call__(self, logits, reqs):
        self.kept.append(logits.float().cpu().clone())
        return self.sampler(logits, reqs)

    def draw(self, *args):
        return self.sampler.draw(*args)


def same_step(config: EngineConfig, prompts: list[list[int]], newcomers: list[list[int]] = ()) -> list[torch.Tensor]:
    """Logits of the second step, without graphs and with them; newcomers arrive after the first. Log-probabilities are
    asked for, so that the sampler gets the logits of a captured step too."""
    logits, params = [], SamplingParams(max_tokens=50, ignore_eos=True, logprobs=0)
    for graph in (False, True):
        engine = build_engine(replace(config, graph=graph))
        eager = engine.runner.eager if graph else engine.runner
        for prompt in prompts:
            engine.add(prompt, params)
        engine.step()
        for prompt in newcomers:
            engine.add(prompt, params)
        eager.sampler = KeepLogits(eager.sampler, logits)
        replays = getattr(engine.runner, "num_replays", -1)
        engine.step()
        assert not graph or engine.runner.num_replays == replays + 1
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
