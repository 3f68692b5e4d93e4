"""Every stage's engine over the same cases: the text is Hugging Face's and stage 1's, however the engine gets there.

A stage joins by a line in ENGINES. Its engine is driven through add, step, abort and generate alone, its integrity is
checked after every step, and every request must end with the reason that the rules give.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from common.checkpoint import load
from common.config import EngineConfig
from common.tokenizer import load_tokenizer
from stage1_naive.generate import generate
from stage2_req import build as stage2
from stage2_req.params import SamplingParams
from stage3_kvcache import build as stage3
from stage4_batch import build as stage4
from stage5_paged import build as stage5
from stage6_cudagraph import build as stage6
from stage7_radix import build as stage7
from tests.conftest import CHECKPOINTS, MAX_POSITION, copy_with_eos, reference
from tests.ranks import build_ranks


def retracting(engine, every: int = 3):
    """Make the youngest running request give way before every third step, however much memory there is."""
    schedule, steps = engine.scheduler.schedule, itertools.count(1)

    def retract_and_schedule():
        if next(steps) % every == 0 and engine.scheduler.running:
            engine.scheduler.retract()
        return schedule()

    engine.scheduler.schedule = retract_and_schedule
    return engine


# id -> builder(EngineConfig) -> Engine
ENGINES = {
    "stage2": stage2.build_engine,
    "stage3": stage3.build_engine,
    "stage4": stage4.build_engine,
    "stage4-chunk7": lambda config: stage4.build_engine(replace(config, max_batch_tokens=7, max_running=3)),
    "stage5-page1": lambda config: stage5.build_engine(replace(config, page_size=1)),
    "stage5-page4-tight": lambda config: stage5.build_engine(
        replace(config, page_size=4, max_batch_tokens=64, kv_tokens=MAX_POSITION)
    ),
    "stage5-page64-retracting": lambda config: retracting(stage5.build_engine(replace(config, page_size=64))),
    "stage6-overlap": lambda config: stage6.build_engine(replace(config, page_size=1)),
    "stage6-graph-chunk7": lambda config: stage6.build_engine(
        replace(config, graph=True, max_batch_tokens=7, max_running=3, kv_tokens=MAX_POSITION)
    ),
    "stage7-page1": lambda config: stage7.build_engine(replace(config, page_size=1, graph=True)),
    "stage7-page4-tight": lambda config: stage7.build_engine(
        replace(config, page_size=4, max_batch_tokens=64, kv_tokens=MAX_POSITION, overlap=False)
    ),
    "stage7-page64-retracting": lambda config: retracting(
        stage7.build_engine(replace(config, page_size=64, order="prefix"))
    ),
    "stage7-page1-retracting-chunk7": lambda config: retracting(
        stage7.build_engine(
            replace(config, page_size=1, graph=True, max_batch_tokens=7, max_running=3, kv_tokens=MAX_POSITION)
        )
    ),
    "stage8-2ranks-page1": lambda config: build_ranks(replace(config, page_size=1), 2),
    "stage8-2ranks-page4-retracting": lambda config: build_ranks(
        replace(config, page_size=4, graph=True, max_batch_tokens=64, kv_tokens=MAX_POSITION), 2, retracting
    ),
}
# prompt length -> tokens asked for; the longest ones fill the model to its last position
LENGTHS = {1: 20, 2: 1, 7: 12, 33: 24, 64: 2, 100: 7, MAX_POSITION - 12: 12, MAX_POSITION - 1: 2}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=1234, max_tokens=24)

ONE_A_STAGE = {name.partition("-")[0]: build for name, build in ENGINES.items()}  # the last of each

every_engine = pytest.mark.parametrize("build", ENGINES.values(), ids=ENGINES)
every_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)


def step(engine) -> list:
    """One step, after which the engine's memory must be in order."""
    outputs = engine.step()
    engine.cache.check_integrity()
    return outputs


def run(engine, limit: int = 2000) -> dict[int, list]:
    """Step until there is no work; uid -> its outputs."""
    outputs = {}
    for _ in range(limit):
        if not engine.has_work():
            return outputs
        for output in step(engine):
            outputs.setdefault(output.uid, []).append(output)
    raise AssertionError(f"still at work after {limit} steps")


def tokens(outputs) -> list[int]:
    return [output.token_id for output in outputs]


def reasons(outputs) -> list:
    return [output.finish_reason for output in outputs]


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


# --- greedy text ------------------------------------------------------------------------------------------------


@every_checkpoint
def test_stage1_and_hugging_face_agree(name, tiny_checkpoint):
    checkpoint = tiny_checkpoint(name)
    loaded = load(checkpoint.config())
    for length, n in LENGTHS.items():
        prompt = checkpoint.prompt(length)
        assert list(generate(loaded.model, loaded.kernels, prompt, n)) == reference(checkpoint, prompt, n)


@every_checkpoint
@every_engine
def test_greedy_text_is_the_references(build, name, tiny_checkpoint):
    checkpoint = tiny_checkpoint(name)
    engine = build(checkpoint.config())
    for order in range(2):
        lengths = random.Random(order).sample(sorted(LENGTHS), len(LENGTHS))
        uids = {engine.add(checkpoint.prompt(n), SamplingParams(max_tokens=LENGTHS[n])): n for n in lengths}
        outputs = run(engine)
        for uid, length in uids.items():
            assert tokens(outputs[uid]) == reference(checkpoint, checkpoint.prompt(length), LENGTHS[length])
            assert reasons(outputs[uid]) == [None] * (LENGTHS[length] - 1) + ["max_tokens"]


@every_engine
def test_requests_may_join_at_any_time(build, llama):
    engine, draw = build(llama.config()), random.Random(7)
    todo = [(llama.prompt(draw.randint(1, 40), seed), draw.randint(1, 12)) for seed in range(16)]
    uids, outputs = {}, {}
    while len(uids) < len(todo) or engine.has_work():
        if len(uids) < len(todo) and draw.random() < 0.3:
            prompt, n = todo[len(uids)]
            uids[engine.add(prompt, SamplingParams(max_tokens=n))] = (prompt, n)
        for output in step(engine):
            outputs.setdefault(output.uid, []).append(output.token_id)
    for uid, (prompt, n) in uids.items():
        assert outputs[uid] == reference(llama, prompt, n)


@every_engine
def test_generate_returns_in_the_order_of_the_prompts(build, llama):
    engine = build(llama.config())
    lengths = [100, 1, 33, 7]
    reqs = engine.generate([llama.prompt(n) for n in lengths], [SamplingParams(max_tokens=LENGTHS[n]) for n in lengths])
    assert [req.output_ids for req in reqs] == [reference(llama, llama.prompt(n), LENGTHS[n]) for n in lengths]
    assert not engine.has_work()
    assert engine.stats().usage == 0 or engine.stats().running == 0
    engine.cache.check_integrity()


# --- how a request ends -----------------------------------------------------------------------------------------


@every_engine
def test_eos_ends_the_text_unless_ignored(build, llama, tmp_path):
    prompt = llama.prompt(9)
    text = reference(llama, prompt, 24)
    eos = text[5]
    end = text.index(eos) + 1
    absent = next(token for token in range(llama.vocab_size) if token not in text)
    folder = copy_with_eos(llama, tmp_path / "eos", [absent, eos])
    engine = build(llama.config(model=str(folder)))
    stops, goes_on = engine.generate(
        [prompt] * 2, [SamplingParams(max_tokens=24, ignore_eos=ignore) for ignore in (False, True)]
    )
    assert (stops.output_ids, stops.finish_reason) == (text[:end], "eos")
    assert (goes_on.output_ids, goes_on.finish_reason) == (text, "max_tokens")
    loaded = load(llama.config(model=str(folder)))
    assert list(generate(loaded.model, loaded.kernels, prompt, 24)) == text[:end]
    # no end before min_tokens: up to there the end tokens can't be chosen, after that they end the text
    late = SamplingParams(max_tokens=end + 30, min_tokens=end + 3, stop_token_ids={text[0]})
    (req,) = engine.generate([prompt], late)
    assert len(req.output_ids) >= end + 3 and req.output_ids[: end - 1] != text[: end - 1]
    assert not {absent, eos, text[0]} & set(req.output_ids[: end + 3])
    (same,) = stage2.build_engine(llama.config(model=str(folder))).generate([prompt], late)
    assert (req.output_ids, req.finish_reason) == (same.output_ids, same.finish_reason)


@every_engine
def test_stop_token_ends_the_text_even_if_eos_is_ignored(build, llama):
    prompt = llama.prompt(9)
    text = reference(llama, prompt, 24)
    stop = text[7]
    params = SamplingParams(max_tokens=24, stop_token_ids={stop}, ignore_eos=True)
    (req,) = build(llama.config()).generate([prompt], params)
    assert (req.output_ids, req.finish_reason) == (text[: text.index(stop) + 1], "stop_token")


@every_engine
@pytest.mark.parametrize(("prompt_len", "max_tokens", "count", "reason"), [
    (40, 1, 1, "max_tokens"),
    (40, 100, 1, "length"),
    (39, 100, 2, "length"),
    (30, 10, 10, "max_tokens"),
    (30, 11, 11, "max_tokens"),
    (30, 12, 11, "length"),
    (1, 100, 40, "length"),
])  # fmt: skip
def test_the_end_at_max_model_len(build, llama, prompt_len, max_tokens, count, reason):
    """max_model_len slots: the last token of all needs none, so a prompt that fills them still yields one token."""
    prompt = llama.prompt(prompt_len)
    (req,) = build(llama.config(max_model_len=40)).generate([prompt], SamplingParams(max_tokens=max_tokens))
    assert (req.output_ids, req.finish_reason) == (reference(llama, prompt, count), reason)


@every_engine
def test_abort_while_waiting_and_while_running(build, llama):
    engine = build(llama.config())
    prompts = [llama.prompt(n) for n in (12, 13, 14)]
    first, second, third = (engine.add(prompt, SamplingParams(max_tokens=10)) for prompt in prompts)
    seen = []
    while first not in [output.uid for output in seen]:
        seen += step(engine)
    assert engine.abort(first)  # it runs
    assert engine.abort(third)  # it waits, or runs, depending on the engine
    engine.cache.check_integrity()
    assert not engine.abort(first)
    assert not engine.abort(10**9)
    outputs = run(engine)
    assert set(outputs) == {second}
    everything = [output.token_id for output in seen if output.uid == second] + tokens(outputs[second])
    assert everything == reference(llama, prompts[1], 10)
    assert not engine.abort(second)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


@every_engine
def test_abort_before_the_first_step(build, llama):
    engine = build(llama.config())
    uid = engine.add(llama.prompt(5), SamplingParams())
    assert engine.abort(uid)
    assert not engine.has_work()
    assert engine.step() == []
    (req,) = engine.generate([llama.prompt(5)], SamplingParams(max_tokens=5))
    assert req.output_ids == reference(llama, llama.prompt(5), 5)


# --- sampled text and logprobs ----------------------------------------------------------------------------------


@every_engine
def test_sampled_text_is_the_same_in_any_stage_and_any_company(build, llama):
    prompt = llama.prompt(20)
    (expected,) = stage2.build_engine(llama.config()).generate([prompt], SAMPLED)
    assert len(set(expected.output_ids)) > 5
    engine = build(llama.config())
    (alone,) = engine.generate([prompt], SAMPLED)
    assert alone.output_ids == expected.output_ids
    company = [
        SamplingParams(max_tokens=10),
        SamplingParams(temperature=1.5, seed=5, max_tokens=30),
        SamplingParams(repetition_penalty=1.3, logit_bias={3: 5.0}, max_tokens=20),
        SamplingParams(temperature=0.5, min_p=0.1, frequency_penalty=0.5, logprobs=3, seed=1, max_tokens=15),
    ]
    prompts = [llama.prompt(n) for n in (3, 50, 8, 17)]
    alone = [engine.generate([p], c)[0].output_ids for p, c in zip(prompts, company, strict=True)]
    together = engine.generate([*prompts[:2], prompt, *prompts[2:]], [*company[:2], SAMPLED, *company[2:]])
    assert together[2].output_ids == expected.output_ids
    assert [together[i].output_ids for i in (0, 1, 3, 4)] == alone


@every_engine
def test_requests_without_a_seed_differ_from_each_other_but_not_from_run_to_run(build, llama):
    prompt, params = llama.prompt(20), SamplingParams(temperature=1.0, max_tokens=12)

    def texts(seed):
        reqs = build(llama.config(seed=seed)).generate([prompt] * 4, params)
        return [tuple(req.output_ids) for req in reqs]

    assert len(set(texts(0))) == 4
    assert texts(0) == texts(0)
    assert not set(texts(0)) & set(texts(1))


@every_engine
@every_checkpoint
def test_logprobs_are_those_of_the_hugging_face_model(build, name, tiny_checkpoint):
    checkpoint = tiny_checkpoint(name)
    prompts = [checkpoint.prompt(n) for n in (1, 30)]
    params = [
        SamplingParams(max_tokens=8, logprobs=0),
        SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.2, seed=3, max_tokens=8, logprobs=5),
    ]
    for prompt, p, req in zip(prompts, params, build(checkpoint.config()).generate(prompts, params), strict=True):
        with torch.inference_mode():
            logits = checkpoint.hf(torch.tensor([prompt + req.output_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1)
        assert len(req.logprobs) == len(req.output_ids) == 8
        for row, token, entry in zip(expected, req.output_ids, req.logprobs, strict=True):
            assert entry.chosen == pytest.approx(row[token].item(), abs=1e-3)
            assert len(entry.top) == p.logprobs
            values, ids = row.topk(p.logprobs)
            assert [i for i, _ in entry.top] == ids.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


@every_engine
def test_logprobs_come_with_the_outputs_of_the_requests_that_asked(build, llama):
    engine = build(llama.config())
    asked = engine.add(llama.prompt(4), SamplingParams(max_tokens=3, logprobs=2))
    other = engine.add(llama.prompt(5), SamplingParams(max_tokens=3))
    outputs = run(engine)
    assert [len(output.logprobs.top) for output in outputs[asked]] == [2, 2, 2]
    assert [output.logprobs for output in outputs[other]] == [None] * 3


@every_engine
def test_the_prompts_logprobs_are_those_of_the_hugging_face_model(build, llama):
    """In chunks, beside others, and the second time with the prompt's keys and values in memory already."""
    engine = build(llama.config())
    wanted = {1: (2, 1), 2: (0, 1), 40: (5, 6), 100: (0, 1)}  # length of the prompt -> (prompt_logprobs, max_tokens)
    for _ in range(2):
        uids = {}
        for length, (most, n) in wanted.items():
            engine.add(llama.prompt(length + 3), SamplingParams(max_tokens=4))
            uids[length] = engine.add(llama.prompt(length), SamplingParams(prompt_logprobs=most, max_tokens=n))
        outputs = run(engine)
        for length, uid in uids.items():
            prompt, (most, n) = llama.prompt(length), wanted[length]
            assert tokens(outputs[uid]) == reference(llama, prompt, n)
            (first, *later), rest = outputs[uid][0].prompt_logprobs, outputs[uid][1:]
            assert first is None and not any(output.prompt_logprobs for output in rest)
            with torch.inference_mode():
                expected = llama.hf(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            for row, token, entry in zip(expected, prompt[1:], later, strict=False):
                assert entry.chosen == pytest.approx(row[token].item(), abs=1e-3)
                assert [i for i, _ in entry.top] == row.topk(most).indices.tolist()
            assert len(later) == length - 1
    for uid, found in outputs.items():
        assert uid in uids.values() or not any(output.prompt_logprobs for output in found)


# --- the real model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_answers(default_model):
    """Three chats as token ids, and Hugging Face's greedy continuation of each."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    tokenizer, result = load_tokenizer("smollm2-135m"), []
    for text in ("The capital of France is", "def fibonacci(n):", "Once upon a time, a small robot"):
        ids = torch.tensor([tokenizer.encode(text)])
        settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        result.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    return result


@pytest.mark.parametrize("build", ONE_A_STAGE.values(), ids=ONE_A_STAGE)
def test_the_default_model_answers_as_in_hugging_face(build, real_answers):
    engine = build(EngineConfig(device="cpu", dtype="float32", max_model_len=64))
    prompts, answers = zip(*real_answers, strict=True)
    reqs = engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    assert [req.output_ids for req in reqs] == list(answers)
