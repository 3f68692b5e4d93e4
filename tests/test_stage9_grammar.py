"""Grammars: every finished text follows its own, in every way that the engine has to get there; others' texts are as ever.

The tokens of the tiny model are the printable characters and one end token, so that text and tokens are easily compared.
"""

import json
import re
import resource
import threading
import time
from dataclasses import replace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import UserError
from stage2_req.req import Req
from stage2_req.sampling import GumbelSampler
from stage7_radix.params import RequestParams
from stage8_tp.build import build_rank
from stage8_tp.ranks import Alone
from stage9_server.grammar import MAX_GRAMMAR
from stage9_server.grammar.admission import Admission
from stage9_server.grammar.compiler import MAX_KEPT, Compiler, Vocabulary
from stage9_server.grammar.sampler import GrammarSampler
from stage9_server.messages import Abort, Failed, Generate
from stage9_server.scheduler_worker import Scheduling
from tests.conftest import PROFILE, make_checkpoint
from tests.ranks import build_ranks
from tests.test_conformance import retracting, run

CHARACTERS = [bytes([byte]) for byte in range(32, 127)]
EOS = len(CHARACTERS)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {  # each with what a whole text must be
    "json:" + json.dumps(PERSON): lambda text: jsonschema.validate(json.loads(text), PERSON),
    r"regex:[a-f]{3,9}-[0-9]+x": lambda text: re.fullmatch(r"[a-f]{3,9}-[0-9]+x", text)[0],
    'choice:["yes", "no \\"quoted\\"", "yes, but"]': ("yes", 'no "quoted"', "yes, but").index,
    'ebnf:root ::= "<" [a-z]+ ">" root? "."': lambda text: re.fullmatch(r"(<[a-z]+>)+\.+", text)[0],
}


def make_compiler() -> Compiler:
    return Compiler(lambda: Vocabulary.build(CHARACTERS, [], frozenset({EOS}), EOS + 1), [EOS])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("grammar"), "llama", eos_token_id=EOS)


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()


def build(config, compiler):
    return build_rank(config, Alone("cpu"), lambda ops: GrammarSampler(GumbelSampler(ops), compiler))


def build_two(config, compiler):
    return build_ranks(config, 2, lambda _: None, lambda ops: GrammarSampler(GumbelSampler(ops), compiler))


ENGINES = {
    "in-turn": lambda config, c: build(replace(config, overlap=False, page_size=4), c),
    "overlap-graph-chunk7": lambda config, c: build(replace(config, graph=True, max_batch_tokens=7, max_running=5), c),
    "retracting": lambda config, c: retracting(build(replace(config, page_size=1, graph=True), c)),
    "2ranks": lambda config, c: build_two(replace(config, graph=True), c),
}
every_engine = pytest.mark.parametrize("build_engine", ENGINES.values(), ids=ENGINES)


def text(ids) -> str:
    return b"".join(CHARACTERS[i] for i in ids if i != EOS).decode()


def constrained(grammar: str, seed: int, **changes) -> RequestParams:
    quote = CHARACTERS.index(b'"')  # so that strings come to an end
    settings = {"temperature": 2.0, "seed": seed, "max_tokens": 200, "logit_bias": {quote: 4.0}, "grammar": grammar}
    return RequestParams(**settings | changes)


@every_engine
def test_texts_follow_their_grammars_and_others_are_as_alone(build_engine, checkpoint, compiler):
    engine = build_engine(checkpoint.config(), compiler)
    free = [
        RequestParams(max_tokens=30),
        RequestParams(temperature=1.0, seed=3, max_tokens=40, logprobs=2),
        RequestParams(temperature=0.7, top_k=9, frequency_penalty=0.5, seed=4, max_tokens=20),
    ]
    prompts = [checkpoint.prompt(n) for n in (5, 20, 33)]
    alone = [engine.generate([prompt], params)[0].output_ids for prompt, params in zip(prompts, free, strict=True)]
    bound = [constrained(grammar, seed) for seed in range(3) for grammar in GRAMMARS]
    bound += [replace(params, temperature=0.0, logprobs=1, prompt_logprobs=0) for params in bound[:4]]
    bound += [replace(params, top_p=0.9, repetition_penalty=1.2) for params in bound[4:8]]
    reqs = engine.generate([*prompts, *(checkpoint.prompt(4 + i) for i in range(len(bound)))], [*free, *bound])
    assert [req.output_ids for req in reqs[:3]] == alone
    finished = [req for req in reqs[3:] if req.finish_reason == "eos"]
    for req in finished:
        GRAMMARS[req.params.grammar](text(req.output_ids))
        assert req.output_ids[-1] == EOS
    assert len(finished) > len(bound) / 2
    assert {req.params.grammar for req in finished} == set(GRAMMARS)
    assert {req.finish_reason for req in reqs[3:]} <= {"eos", "max_tokens"}


def test_the_same_seed_gives_the_same_text_in_every_engine(checkpoint, compiler):
    """A draw depends on seed and position alone, and the mask on the tokens alone."""
    prompts = [checkpoint.prompt(n) for n in range(3, 11)]
    params = [constrained(grammar, seed, max_tokens=50) for seed in range(2) for grammar in GRAMMARS]
    texts = set()
    for build_engine in ENGINES.values():
        reqs = build_engine(checkpoint.config(), compiler).generate(prompts, params)
        texts.add(tuple(tuple(req.output_ids) for req in reqs))
    assert len(texts) == 1


def test_log_probabilities_are_the_models_own(checkpoint, compiler):
    (req,) = build(checkpoint.config(), compiler).generate(
        [checkpoint.prompt(9)], constrained('choice:["abc"]', 0, logprobs=3)
    )
    assert text(req.output_ids) == "abc"
    with torch.inference_mode():
        rows = checkpoint.hf(torch.tensor([checkpoint.prompt(9) + req.output_ids])).logits[0, 8:-1].log_softmax(-1)
    for row, token, entry in zip(rows, req.output_ids, req.logprobs, strict=True):
        assert entry.chosen == pytest.approx(row[token].item(), abs=1e-3)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


def test_max_tokens_inside_a_text_ends_it_there(checkpoint, compiler):
    person = next(iter(GRAMMARS))
    (req,) = build(checkpoint.config(), compiler).generate([checkpoint.prompt(3)], constrained(person, 1, max_tokens=9))
    assert (len(req.output_ids), req.finish_reason) == (9, "max_tokens")
    assert text(req.output_ids).startswith("{") and "}" not in text(req.output_ids)


def test_a_text_that_can_only_end_ends(checkpoint, compiler):
    (req,) = build(checkpoint.config(), compiler).generate([checkpoint.prompt(3)], constrained('choice:["k"]', 1))
    assert (text(req.output_ids), req.output_ids[-1], req.finish_reason) == ("k", EOS, "eos")


def test_a_stop_token_that_the_grammar_allows_ends_the_text_too(checkpoint, compiler):
    stop = CHARACTERS.index(b"-")
    params = constrained("regex:[a-c]{2}-[0-9]{3}", 0, stop_token_ids={stop})
    (req,) = build(checkpoint.config(), compiler).generate([checkpoint.prompt(3)], params)
    assert req.finish_reason == "stop_token" and re.fullmatch("[a-c]{2}-", text(req.output_ids))


def test_a_model_with_more_tokens_than_its_tokenizer():
    """Of the tokens without a text none is drawn, and they are empty: copies of one token would make every mask dear."""
    for size in (EOS + 1, 100_001):
        vocabulary = Vocabulary.build(CHARACTERS, [], frozenset({EOS}), size)
        assert len(vocabulary.tokens) == size and not any(vocabulary.tokens[EOS + 1 :])
        padded = Compiler(lambda vocabulary=vocabulary: vocabulary, [EOS])
        padded.prepare("regex:[a-c]+").result()
        sampler, reqs = GrammarSampler(GumbelSampler(), padded), bound_and_free()
        logits = torch.zeros(2, size)
        logits[:, EOS + 1 :] = 1
        tokens = sampler(logits, reqs).tokens
        assert CHARACTERS[tokens[0]] in (b"a", b"b", b"c") and (size == EOS + 1 or tokens[1] > EOS)


def bound_and_free() -> list[Req]:
    params = [RequestParams(grammar="regex:[a-c]+"), RequestParams(temperature=0)]
    return [Req(i, [1], p, 0, 100, frozenset({EOS})) for i, p in enumerate(params)]


# --- random schemas ---------------------------------------------------------------------------------------------

leaf = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "k"}, {"enum": [1, "two", None, [3]]}]),
    st.builds(
        lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, st.integers(-50, 50), st.integers(0, 99)
    ),
    st.builds(
        lambda a, n: {"type": "string", "minLength": a, "maxLength": a + n}, st.integers(0, 3), st.integers(0, 4)
    ),
    st.sampled_from([{"type": "string", "pattern": "^[A-C]{2}[0-9]$"}, {"type": "string", "format": "date"}]),
)


def wider(inner):
    names = st.sampled_from(["a", "b c", 'q"', "d_e"])
    return st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda fields, wanted: {
                "type": "object",
                "properties": fields,
                "required": [name for name in fields if name in wanted],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=3),
            st.sets(names),
        ),
    )


@settings(PROFILE, max_examples=PROFILE.max_examples // 5)
@given(schemas=st.lists(st.recursive(leaf, wider, max_leaves=6), min_size=4, max_size=4), seed=st.integers(0, 2**30))
def test_random_schemas(checkpoint, compiler, running, schemas, seed):
    grammars = ["json:" + json.dumps(schema) for schema in schemas]
    prompts = [checkpoint.prompt(3 + i) for i in range(5)]
    params = [constrained(grammar, seed + i, max_tokens=150) for i, grammar in enumerate(grammars)]
    free = RequestParams(temperature=1.0, seed=7, max_tokens=12)
    *reqs, other = running.generate(prompts, [*params, free])
    assert other.output_ids == running.generate(prompts[-1:], free)[0].output_ids
    for req, schema in zip(reqs, schemas, strict=True):
        if req.finish_reason == "eos":
            jsonschema.validate(json.loads(text(req.output_ids)), schema)
        else:
            assert req.finish_reason == "max_tokens"


@pytest.fixture(scope="module")
def running(checkpoint, compiler):
    return build(checkpoint.config(graph=True), compiler)


# --- what can't be, or may not --------------------------------------------------------------------------------

DEEP = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
REFUSED = {  # each names what is wrong
    "json:" + json.dumps({"type": "array", "uniqueItems": True}): "uniqueItems",
    "json:" + json.dumps({"type": "widget"}): "widget",
    "json:{": "json grammar",
    "json:" + json.dumps(DEEP): "recursion",
    "json:" + json.dumps({"enum": ["x" * 60000, "y" * 6000]}): str(MAX_GRAMMAR),
    "json:"
    + json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}): (
        "too"
    ),
    "json:" + json.dumps({"multipleOf": 1e9, "type": "integer"}): "multipleOf",
    "json:" + json.dumps({"allOf": [{"multipleOf": n / 1e3} for n in range(4_001, 4_004)]}): "multipleOf",
    'json:{"$ref": "#"}': "no text fits",
    "regex:(unclosed": "unclosed",
    "regex:(?=a)b": "look-around",
    "ebnf:root ::= nothing": "nothing",
    "ebnf:]": "ebnf grammar",
    "choice:[]": "choice",
    "choice:[1]": "choice",
    "choice:x": "choice",
}


@pytest.mark.parametrize("grammar", REFUSED)
def test_what_is_refused_names_its_reason(compiler, grammar):
    with pytest.raises(UserError, match=REFUSED[grammar]):
        compiler.prepare(grammar).result()


HOSTILE = {
    "pattern": "json:" + json.dumps({"type": "string", "pattern": "(a|b){1,1000}(c|d){1,10000}[^x]*y.{500}"}),
    "items": "json:" + json.dumps({"type": "array", "items": {}, "minItems": 100000}),
    "back and forth": "regex:(.*a){20}.{200}",
    "nested counts": "regex:((a{1,100}){1,100}){1,100}",
    "forced, counted": "regex:(x{1000}){1000}",
    "forced, spelt out": "json:" + json.dumps({"const": "xy" * 30_000}),
    "many fields": "json:" + json.dumps({"properties": {f"p{i}": {} for i in range(1300)}, "type": "object"}),
    "many choices": "choice:" + json.dumps([f"a{i}" for i in range(1024)]),
    "references": "json:" + json.dumps({"$ref": "#/$defs/d0", "$defs": {"d40": {"type": "null"}} | {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}}),
    "multiples": "json:" + json.dumps({"multipleOf": 9973, "type": "integer"}),
    "ambiguous": 'lark:start: a\na: a a a | "y" | ""',
}  # fmt: skip


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_bounded(checkpoint, grammar):
    """In time and memory. It goes on within its limits, or its text ends and its owner learns why; the engine stays usable."""
    compiler = make_compiler()
    compiler.prepare('choice:["fine"]').result()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiler.prepare(grammar).result()
    engine, steps = build(checkpoint.config(), compiler), []
    uid = engine.add(checkpoint.prompt(3), constrained(grammar, 0, max_tokens=60))
    outputs = []
    while engine.has_work():
        start = time.process_time()
        outputs += engine.step()
        steps.append(time.process_time() - start)
    assert len(outputs) == 60 or uid in compiler.failed or outputs[-1].finish_reason == "eos"
    assert (
        sorted(steps)[len(steps) // 2] < 0.2 and max(steps) < 3
    )  # CPU seconds, far from what the same take without limits
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # KiB
    (req,) = engine.generate([checkpoint.prompt(3)], constrained('choice:["fine"]', 0))
    assert text(req.output_ids) == "fine"


def test_a_grammar_that_can_not_go_on_is_reported_and_ends(checkpoint):
    """After the first brace there are too many ways to go on."""
    compiler = make_compiler()
    engine = build(checkpoint.config(), compiler)
    uid = engine.add(
        checkpoint.prompt(3), constrained(HOSTILE["many fields"], 0, max_tokens=250, logit_bias={EOS: -100})
    )
    outputs = run(engine)[uid]
    assert outputs[-1].finish_reason == "eos" and "items" in compiler.take_failed()[uid]


def test_no_more_than_so_many_compiled_grammars_are_kept(checkpoint):
    compiler = make_compiler()
    for i in range(MAX_KEPT + 3):
        compiler.prepare(f'choice:["{i}"]').result()
    assert len(compiler.compiled) == MAX_KEPT
    (req,) = build(checkpoint.config(), compiler).generate([checkpoint.prompt(3)], constrained('choice:["0"]', 0))
    assert text(req.output_ids) == "0"  # compiled again


@pytest.mark.parametrize("more", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_contradicts_a_grammar(more):
    with pytest.raises(UserError, match="a grammar says where the text ends"):
        RequestParams(grammar="json:{}", **more)


def test_a_model_without_an_end_token_has_no_grammars():
    with pytest.raises(UserError, match="end token"):
        Compiler(lambda: Vocabulary.build(CHARACTERS, [], frozenset(), 95), []).prepare("json:{}").result()


# --- waiting for a grammar ------------------------------------------------------------------------------------


def test_a_call_waits_for_its_grammar_and_holds_up_no_other(compiler):
    gate, reads = threading.Event(), []

    def read():
        reads.append(gate.wait(30))
        return Vocabulary.build(CHARACTERS, [], frozenset({EOS}), EOS + 1)

    admission = Admission(Compiler(read, [EOS]))
    admission.compiler.begin()  # as soon as the server loads
    calls = [Generate([i], [1], RequestParams(grammar=g)) for i, g in enumerate(["regex:a+", "regex:(", ""])]
    assert [admission.hold(call) for call in calls] == [True, True, False]
    assert admission.take() == []
    gate.set()
    over = []
    while len(over) < 2:
        over += admission.take()
        time.sleep(0.001)
    assert [call.uids for call, _ in over] == [[0], [1]]
    assert over[0][1] == "" and "regex" in over[1][1]
    assert not admission.hold(calls[0]) and not admission.held
    assert reads == [True]


def test_the_scheduler_ends_what_its_grammar_can_not_and_forgets_who_left(checkpoint, compiler):
    """No token goes out that only stands there because nothing else was allowed."""
    admission = Admission(make_compiler())
    engine = build(checkpoint.config(overlap=False), admission.compiler)
    scheduling = Scheduling(engine, 10, admission)
    bad = constrained(HOSTILE["many fields"], 0, max_tokens=250, logit_bias={EOS: -100})
    good = constrained('choice:["fine"]', 0)
    sent, tokens = [], {}
    sent += scheduling.handle(Generate([1], checkpoint.prompt(3), bad))
    sent += scheduling.handle(Generate([2, 3], checkpoint.prompt(3), good))
    sent += scheduling.handle(Abort([3]))  # while it waits
    while admission.held or engine.has_work():
        for token in scheduling.step().tokens:
            tokens.setdefault(token.uid, []).append(token)
        sent += admission.settle(scheduling)
    failed = [message for _, message in sent if isinstance(message, Failed)]
    assert [message.uids for message in failed] == [[1]] and "too much time" in failed[0].message
    assert not any(token.finish_reason for token in tokens[1])
    assert text(token.token_id for token in tokens[2]) == "fine" and 3 not in tokens
    assert not scheduling.live
