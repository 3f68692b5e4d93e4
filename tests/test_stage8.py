"""Several ranks compute what one computes, and decide alike. The ranks are threads here; processes are in test_stage8_launch.py."""

import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import checkpoint_tensors, empty_model, load, load_weights
from common.config import DUMMY_MODELS, EngineConfig, ModelConfig, UserError
from stage2_req.attention import FullAttention
from stage2_req.params import SamplingParams
from stage2_req.req import Batch, Req
from stage2_req.runner import ModelRunner
from stage2_req.sampling import GumbelSampler
from stage6_cudagraph.graph_runner import GraphRunner
from stage7_radix.build import build_engine as build_stage7
from stage7_radix.params import RequestParams
from stage8_tp import build as stage8
from stage8_tp.engine import AbortCall, AddCall, CloseCall, GenerateCall, StepCall, TPEngine, decode
from stage8_tp.meter import MeteredRanks
from stage8_tp.ranks import Alone, join
from stage8_tp.shard import RankPart, Shard, VocabParallelEmbedding, shard_model
from tests.conftest import CHECKPOINTS, make_checkpoint
from tests.histories import History
from tests.ranks import ThreadRanks, build_ranks, on_ranks, start_ranks

# 3 KV heads and 97 tokens: nothing that 2 or 6 ranks could deal out evenly
ODD = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 97,
}
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}
LENGTHS, LONGEST = (1, 3, 8, 16, 17, 30), 24
CASES = {(length, kind): (length, KINDS[kind]) for length in LENGTHS for kind in KINDS}


@pytest.fixture(scope="module")
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def odd_checkpoint(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("odd"), {}

    def get(name: str, **changes):
        key = f"{name}-{sorted(changes.items())}"
        if key not in made:
            made[key] = make_checkpoint(folder / str(len(made)), name, **ODD | changes)
        return made[key]

    return get


# --- sharded against whole --------------------------------------------------------------------------------------


def logits(model, kernels, prompts: list[list[int]]) -> torch.Tensor:
    """[prompts, V], of whole prompts in one step."""
    reqs = [Req(uid, ids, SamplingParams(), 0, 512, frozenset()) for uid, ids in enumerate(prompts)]
    batch = Batch.build([(req, req.extend_len) for req in reqs], range(len(reqs)))
    runner = ModelRunner(model, FullAttention(kernels, torch.device("cpu")), GumbelSampler())
    with torch.inference_mode():
        return model.head(runner.compute(runner.prepare(batch)))


def check_logits(config: EngineConfig, world: int) -> list[ModelConfig]:
    whole = load(config)
    vocab = whole.model.config.vocab_size
    prompts = [[(7 * i + 3 * j) % vocab for j in range(n)] for i, n in enumerate((1, 5, 40))] + [[0, vocab - 1, 0]]
    want = logits(whole.model, whole.kernels, prompts)

    def part(ranks: ThreadRanks):
        m = load(config, partial(RankPart, ranks))
        assert m.shape == whole.shape
        return m.model.config, logits(m.model, m.kernels, prompts)

    parts = on_ranks(world, part)
    for _, got in parts:
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-5 * max(1, want.abs().max())
        assert torch.equal(got, parts[0][1])
    return [shape for shape, _ in parts]


@pytest.mark.parametrize("world", [2, 3, 6])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_odd_shapes(odd_checkpoint, name, world):
    shapes = check_logits(odd_checkpoint(name).config(), world)
    assert sum(shape.num_heads for shape in shapes) == 6
    assert sum(shape.num_kv_heads for shape in shapes) == max(3, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_even_shapes(tiny_checkpoint, name, world):
    shapes = check_logits(tiny_checkpoint(name).config(), world)
    assert {(s.num_heads, s.num_kv_heads, s.intermediate_size) for s in shapes} == {(4 // world, 1, 64 // world)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 8, 17, 128])
def test_logits_with_other_heads_biases_and_vocabularies(odd_checkpoint, tied, bias, vocab_size):
    """Also where the last ranks have no token at all."""
    name = "qwen2" if bias else "llama"
    changes = {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    if vocab_size == 1:
        changes["pad_token_id"] = 0
    check_logits(odd_checkpoint(name, **changes).config(), 3)


@pytest.mark.parametrize("world", [2, 4])
def test_dummy_weights_are_parts_of_the_whole_dummy(world):
    check_logits(EngineConfig("dummy:tiny", device="cpu", dtype="float32"), world)


def test_tied_embeddings_stay_tied():
    whole = DUMMY_MODELS["smollm2-135m"]
    shard = Shard(whole, 1, 2)
    model = empty_model(shard.config, torch.device("cpu"), torch.bfloat16)
    shard_model(model, shard, Alone(torch.device("cpu")))
    assert model.lm_head.linear.weight is model.embed_tokens.embedding.weight


def test_the_embedding_of_a_token_comes_from_one_rank():
    table = torch.nn.Embedding(8, 4).requires_grad_(False)
    part = VocabParallelEmbedding(table, 8, Alone(torch.device("cpu")))
    rows = part(torch.tensor([7, 8, 15, 16]))
    assert torch.equal(rows, torch.stack((torch.zeros(4), table.weight[0], table.weight[7], torch.zeros(4))))


# --- which rank has what ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DUMMY_MODELS)
def test_every_part_of_every_weight_has_an_owner(name):
    whole = DUMMY_MODELS[name]
    for world in (1, 2, 3, 4, 8, 16):
        try:
            shards = [Shard(whole, rank, world) for rank in range(world)]
        except UserError:
            continue
        copies = max(1, world // whole.num_kv_heads)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens"):
            spans = [shard.span(projection) for shard in shards]
            owners = np.zeros(spans[0][1], int)
            for _, _, part in spans:
                owners[part.start : part.stop] += 1
            assert (owners == (copies if projection in ("k_proj", "v_proj") else 1)).all()
        for shard in shards:  # a rank has the K and V of its queries, and equally many queries for each
            group = whole.num_heads // whole.num_kv_heads
            assert {head // group for head in shard.heads} == set(shard.kv_heads)
            assert len(shard.heads) % len(shard.kv_heads) == 0


@pytest.mark.parametrize(("name", "world", "sizes"), [
    ("smollm2-135m", 4, "1 or 2 or 3"),
    ("tiny", 3, "1 or 2 or 4"),
    ("llama3-8b", 3, "1 or 2 or 4 or 7 or 8 or 16 or 32"),
])  # fmt: skip
def test_sizes_that_do_not_divide(name, world, sizes):
    with pytest.raises(UserError, match=f"can't be divided among {world} ranks; use --tp {sizes}$"):
        Shard(DUMMY_MODELS[name], 0, world)


def test_a_checkpoint_that_is_not_what_its_config_says(tiny_checkpoint, tmp_path):
    """A slice of a weight that is too large would pass for the right one."""
    config = ModelConfig(**vars(load(tiny_checkpoint("llama").config()).model.config))
    for change in ({"num_heads": 2}, {"intermediate_size": 32}, {"vocab_size": 80}):
        shard = Shard(replace(config, **change), 0, 2)
        model = empty_model(shard.config, torch.device("cpu"), torch.float32)
        with pytest.raises(UserError, match=r"has shape .* but config.json asks for"):
            load_weights(model, checkpoint_tensors(tiny_checkpoint("llama").path, torch.device("cpu")), shard)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_single_number_in_place_of_a_weight(name, tiny_checkpoint, tmp_path):
    """It has no dimension that could be dealt out."""
    llama = tiny_checkpoint("llama")
    save_file(load_file(llama.path / "model.safetensors") | {name: torch.zeros(())}, tmp_path / "model.safetensors")
    config = load(llama.config()).shape
    for rank in range(2):
        shard = Shard(config, rank, 2)
        model = empty_model(shard.config, torch.device("cpu"), torch.float32)
        with pytest.raises(UserError, match=rf"{name} has shape \[\]"):
            load_weights(model, checkpoint_tensors(tmp_path, torch.device("cpu")), shard)


LARGE = ModelConfig(32000, 1024, 4096, 6, 16, 16, 64, 512)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_a_rank_takes_memory_for_no_more_than_its_part(tmp_path):
    """Of a checkpoint in one file; weights that are cut into columns are the hard ones. A fresh process does the reading."""
    model = empty_model(LARGE, torch.device("cpu"), torch.bfloat16)
    weights = {}
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
            module, (module,)
        )
        for part, tensor in zip(parts, parameter.data.chunk(len(parts)), strict=True):
            weights[name.replace(module, part)] = tensor.fill_(0.5).clone()
    save_file(weights, tmp_path / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    command = [sys.executable, "-m", "tests.test_stage8", str(tmp_path)]
    peak = int(subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, check=True).stdout)
    assert size > 300e6
    assert size / 4 * 0.95 < peak < size / 4 + 50e6


def print_peak(folder: Path) -> None:
    """Load rank 1 of 4; print the bytes that this took at most, of memory that is no file's."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

    def watched(tensors):
        nonlocal peak
        for item in tensors:
            yield item
            peak = max(peak, anonymous() - before)

    shard, device, peak = Shard(LARGE, 1, 4), torch.device("cpu"), 0
    empty_model(DUMMY_MODELS["tiny"], device, torch.bfloat16)  # what the first model of all takes is not counted
    before = anonymous()
    model = empty_model(shard.config, device, torch.bfloat16)
    load_weights(model, watched(checkpoint_tensors(folder, device)), shard)
    assert all((parameter == 0.5).all() for parameter in model.parameters())
    print(peak)


# --- the engine -------------------------------------------------------------------------------------------------


def small(llama, **changes) -> EngineConfig:
    defaults = {"page_size": 4, "kv_tokens": 80, "max_batch_tokens": 16, "max_running": 5, "max_model_len": 64}
    return llama.config(**defaults | changes)


def state(engine: TPEngine) -> dict:
    """All that decides what an engine does next."""
    cache, scheduler = engine.cache, engine.scheduler
    used = [pages.tolist() for pages in cache.owned_pages()]
    nodes = sorted((node.key.tolist(), node.pages.tolist(), node.locks, node.used) for node in cache.tree.nodes())
    return {
        "pages": used,
        "table_idx": (cache.table_idx, cache.free_table_idx),
        "free pages": cache.allocator.free_pages().tolist(),
        "tree": nodes,
        "queues": [[(r.uid, r.token_ids) for r in queue] for queue in (scheduler.running, scheduler.waiting)],
        "counts": (engine.stats(), engine.engine.next_uid),
    }


@pytest.fixture(scope="module")
def texts(llama):
    """(prompt length, kind) -> the text of one rank, whose engine is stage 7's."""
    params = [SamplingParams(max_tokens=LONGEST, **kind) for _, kind in CASES.values()]
    reqs = build_stage7(llama.config()).generate([llama.prompt(length) for length, _ in CASES.values()], params)
    return {case: req.output_ids for case, req in zip(CASES, reqs, strict=True)}


def random_history(engine, llama, texts, rng: random.Random, requests: int) -> None:
    """Random adds and aborts between steps, now and then a generate; every text is that of one rank."""
    history = History(engine, rng)
    while requests or engine.has_work():
        if requests and rng.random() < 0.7:
            requests -= 1
            length, kind, n = rng.choice(LENGTHS), rng.choice([*KINDS]), rng.randint(1, LONGEST)

            def params(stop, kind=kind, n=n):
                salt = rng.choice(["", "", "a"])
                return RequestParams(max_tokens=n, stop_token_ids=stop, cache_salt=salt, **KINDS[kind])

            history.add(llama.prompt(length), texts[length, kind], n, 0.5, params)
        history.abort_one(0.07)
        history.step()
        if not engine.has_work() and rng.random() < 0.3:
            req = engine.generate([llama.prompt(8)], SamplingParams(max_tokens=5))[0]
            assert req.output_ids == texts[8, "greedy"][:5]
    history.check()


@pytest.mark.parametrize(("world", "page_size", "budget", "graph", "overlap"), [
    (2, 1, 16, False, True),
    (2, 4, 5, False, False),
    (2, 4, 16, True, True),
    (2, 8, 64, True, False),
    (4, 4, 16, True, True),
])  # fmt: skip
def test_random_histories(llama, texts, world, page_size, budget, graph, overlap):
    config = small(llama, page_size=page_size, max_batch_tokens=budget, graph=graph, overlap=overlap, kv_tokens=64)
    engines, threads = start_ranks(config, world, lambda engine: setattr(engine.cache, "reserve", 1))
    random_history(engines[0], llama, texts, random.Random(3), 16)
    engines[0].close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for other in engines[1:]:
        assert state(other) == state(engines[0])
    assert engines[0].stats().retracted
    assert engines[0].stats().hit_tokens


def test_temperature_1_without_seeds_is_one_ranks_text(llama):
    params = SamplingParams(temperature=1.0, max_tokens=20)
    want = stage8.build_engine(llama.config()).generate([llama.prompt(9)] * 4, params)
    got = build_ranks(llama.config(), 2).generate([llama.prompt(9)] * 4, params)
    assert [req.output_ids for req in got] == [req.output_ids for req in want]
    assert len({tuple(req.output_ids) for req in got}) == 4


def test_only_rank_0_draws(llama):
    """The others may see other logits, a last bit or all of them: the tokens are rank 0's."""
    config = small(llama, kv_tokens=400)
    (want,) = stage8.build_engine(config).generate([llama.prompt(9)], SamplingParams(max_tokens=20))

    def blind(engine: TPEngine) -> None:
        if engine.ranks.rank:
            model = getattr(engine.runner, "eager", engine.runner).model
            model.lm_head.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))

    for graph in (False, True):
        engines, threads = start_ranks(replace(config, graph=graph), 2, blind)
        (req,) = engines[0].generate([llama.prompt(9)], SamplingParams(max_tokens=20))
        engines[0].close()
        threads[0].join(60)
        assert req.output_ids == want.output_ids
        assert state(engines[1]) == state(engines[0])


def test_the_pool_is_the_smallest_ranks(odd_checkpoint, monkeypatch):
    """Ranks with more KV heads have room for fewer tokens; all must count alike."""
    monkeypatch.setattr(stage8, "pool_tokens", lambda m: 480 // m.model.config.num_kv_heads)
    config = odd_checkpoint("llama").config(page_size=1)
    engines = on_ranks(2, lambda ranks: stage8.build_rank(config, ranks))
    assert [engine.cache.allocator.num_pages for engine in engines] == [240, 240]
    assert [engine.runner.attention.pool.k[0].shape[:2] for engine in engines] == [(241, 1), (241, 2)]


# --- what is broadcast ------------------------------------------------------------------------------------------


class Recorded(Alone):
    """One rank, and the calls that it broadcasts to others, which are not there."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.messages = []

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        self.messages.append(decode(message))
        return message


def recorded(config: EngineConfig) -> tuple[TPEngine, list]:
    """Rank 0's engine, over the whole model; and its messages."""
    engine = TPEngine(build_stage7(config), Recorded())
    return engine, engine.ranks.messages


def test_one_message_a_step_and_none_when_idle(llama):
    engine, messages = recorded(small(llama, overlap=False))
    assert engine.step() == []
    uid = engine.add(llama.prompt(3), RequestParams(max_tokens=5, seed=2**90, logit_bias={3: 1.0}, cache_salt="x"))
    other = engine.add(np.array(llama.prompt(4)), SamplingParams(max_tokens=5), 70)
    assert (uid, other) == (0, 70)
    assert messages == []
    engine.step()
    (first,) = messages
    params = RequestParams(max_tokens=5, logit_bias={3: 1.0}, cache_salt="x")
    added = [AddCall(llama.prompt(3), params, 0), AddCall(llama.prompt(4), RequestParams(max_tokens=5), 70)]
    assert first == [*added, StepCall()]
    engine.step()
    assert messages[1:] == [[StepCall()]]
    assert engine.abort(other)
    assert not engine.abort(other)
    engine.step()
    assert messages[2:] == [[AbortCall(other), StepCall()]]
    assert engine.abort(uid)
    assert engine.step() == []
    engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    engine.close()
    generated = [AbortCall(uid), GenerateCall([[1, 2]], [RequestParams(max_tokens=3)])]
    assert messages[3:] == [generated, [CloseCall()]]


def test_a_request_that_is_refused_is_not_broadcast(llama):
    engine, messages = recorded(small(llama))
    for prompt, params in (
        ([], SamplingParams()),
        ([10**6], SamplingParams()),
        ([1] * 100, SamplingParams()),
        ([1], SamplingParams(stop_token_ids={10**6})),
    ):
        with pytest.raises(UserError):
            engine.add(prompt, params)
    assert not engine.has_work()
    engine.add([1], SamplingParams(max_tokens=1), 5)
    with pytest.raises(UserError, match="uid 5 belongs"):
        engine.add([2], SamplingParams(max_tokens=1), 5)
    engine.step()
    assert messages == [[AddCall([1], RequestParams(max_tokens=1), 5), StepCall()]]


def test_all_ranks_know_a_request_by_the_callers_uid(llama, texts):
    engines, threads = start_ranks(small(llama), 2)
    uids = [engines[0].add(llama.prompt(8), SamplingParams(max_tokens=9), uid) for uid in (1000, 3, None)]
    assert uids == [1000, 3, 1001]
    seen = {uid: [] for uid in uids}
    for _ in range(4):
        for output in engines[0].step():
            seen[output.uid].append(output.token_id)
    assert engines[0].abort(3)
    while engines[0].has_work():
        for output in engines[0].step():
            seen[output.uid].append(output.token_id)
    assert seen[1000] == seen[1001] == texts[8, "greedy"][:9]
    assert seen[3] == texts[8, "greedy"][:3]
    engines[0].close()
    threads[0].join(60)
    assert state(engines[1]) == state(engines[0])
    assert engines[0].engine.next_uid == 1002


def test_one_rank_has_the_engine_of_stage_7(llama):
    engine, expected = stage8.build_rank(small(llama), Alone(torch.device("cpu"))), build_stage7(small(llama))
    assert type(engine) is type(expected)
    assert not isinstance(engine, TPEngine)
    assert isinstance(on_ranks(2, lambda ranks: stage8.build_rank(small(llama), ranks))[0], TPEngine)


def test_a_generate_that_is_refused_leaves_all_ranks_usable(llama, texts):
    engines, threads = start_ranks(small(llama), 2)
    with pytest.raises(UserError):
        engines[0].generate([[1], []], SamplingParams())
    with pytest.raises(UserError):
        engines[0].generate([[1], [2]], [SamplingParams()])
    (req,) = engines[0].generate([llama.prompt(8)], SamplingParams(max_tokens=9))
    assert req.output_ids == texts[8, "greedy"][:9]
    engines[0].close()
    threads[0].join(60)
    assert state(engines[1]) == state(engines[0])


def test_followers_sleep_while_there_is_nothing_to_do(llama):
    engines, threads = start_ranks(small(llama), 2)
    engines[0].generate([[1]], SamplingParams(max_tokens=2))
    steps = engines[0].stats().steps
    while engines[1].stats().steps < steps:  # it may be a little behind
        time.sleep(0.01)
    for _ in range(20):
        engines[0].step()
        time.sleep(0.01)
    assert engines[1].stats().steps == steps
    assert threads[0].is_alive()
    engines[0].close()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_follower_that_fails_ends_the_others(llama):
    """Of the harness: a thread that dies must not leave rank 0 waiting."""

    def work(ranks: ThreadRanks) -> None:
        if ranks.rank:
            raise KeyError("rank 1")
        ranks.all_gather_ints([0])

    with pytest.raises(KeyError, match="rank 1"):
        on_ranks(2, work)


def test_collectives_are_as_many_and_as_large_as_the_formula_says(odd_checkpoint):
    config = odd_checkpoint("llama").config(page_size=1)
    metered = {}

    def work(ranks: ThreadRanks) -> TPEngine:
        metered[ranks.rank] = MeteredRanks(ranks)
        return stage8.build_rank(replace(config, overlap=False), metered[ranks.rank])

    engine, other = on_ranks(2, work)
    thread = threading.Thread(target=other.follow, daemon=True)
    thread.start()
    engine.generate([[1, 2, 3], [4] * 30], SamplingParams(max_tokens=6))
    engine.close()
    thread.join(60)
    stats, layers, hidden = engine.stats(), 2, 48
    assert (stats.computed_tokens, stats.output_tokens) == (3 + 30 + 10, 12)
    for meter in metered.values():
        assert meter.calls == {
            "all_reduce": stats.steps * (2 * layers + 1),
            "all_gather": stats.steps,
            "broadcast": stats.steps,
        }
        tokens = 56  # half of 97, in eights
        assert meter.bytes == {
            "all_reduce": (2 * layers + 1) * stats.computed_tokens * hidden * 4,
            "all_gather": stats.output_tokens * tokens * 4,
            "broadcast": stats.output_tokens * 8,
        }
        assert meter.seconds > 0


# --- mistakes ---------------------------------------------------------------------------------------------------


def test_as_many_ranks_as_were_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="tp is 2, but 1 ranks were started; start as many"):
        join(2, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="tp is 1, but 3 ranks"):
        join(1, "cpu")
    with pytest.raises(UserError, match="tp is 0"):
        EngineConfig(tp=0)


def test_no_graphs_where_ranks_share_a_gpu(llama):
    def work(ranks: ThreadRanks):
        ranks.staged = True
        with pytest.raises(UserError, match="use --no-graph"):
            stage8.build_rank(llama.config(graph=True), ranks)
        return isinstance(stage8.build_rank(llama.config(), ranks).runner, GraphRunner)

    assert on_ranks(2, work) == [False, False]


if __name__ == "__main__":
    print_peak(Path(sys.argv[1]))
