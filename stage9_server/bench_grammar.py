"""What grammars cost: compiling one, the masks of a step, and the throughput of requests that have one against free ones.

python stage9_server/bench_grammar.py
python stage9_server/bench_grammar.py --model dummy:qwen3-0.6b --requests 256

The libraries are compared where both are installed (pip install --no-deps xgrammar apache-tvm-ffi).
"""

import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from common import cli, report
from common.checkpoint import load_config
from stage2_req.engine import Engine
from stage2_req.sampling import GumbelSampler
from stage6_cudagraph.bench_offline import ENGINE_FLAGS
from stage7_radix.params import RequestParams
from stage8_tp.build import build_rank
from stage8_tp.ranks import join
from stage9_server.grammar.compiler import Compiler, Vocabulary
from stage9_server.grammar.sampler import GrammarSampler
from stage9_server.grammar.vocabulary import vocabulary

PROMPT, LARGE_VOCABULARY, BATCHES = 32, 151_936, (1, 32, 256)
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kind": {"enum": ["book", "pen", "cup"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "price": {"type": "number"},
    },
    "required": ["id", "kind", "tags", "price"],
    "additionalProperties": False,
}
SCHEMAS = {
    "order": ORDER,
    "any object": {"type": "object"},
    "200 fields": {
        "type": "object",
        "properties": {f"field_{i}": {"type": ["string", "integer", "boolean"][i % 3]} for i in range(200)},
        "required": [f"field_{i}" for i in range(200)],
        "additionalProperties": False,
    },
}
TEXT = b'{"id": 17, "kind": "pen", "tags": ["red ink", "fine"], "price": 2.50}'
ENDLESS = "json:" + json.dumps({"type": "array", "items": ORDER, "minItems": 200})  # so that all texts are as long
LIBRARY_COLUMNS = ["library", "vocabulary", "schema", "compile, ms", *(f"masks of {n}, ms" for n in BATCHES)]
COLUMNS = ["requests", "seconds", "output tokens/s", "of free, %"]


def main() -> None:
    parser = cli.parser(__doc__, *ENGINE_FLAGS)
    parser.add_argument("--requests", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones of each request (default: 64)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each kind, in turn; the best counts (default: 3)"
    )
    args = parser.parse_args()
    small = vocabulary("smollm2-135m" if args.model.startswith("dummy:") else args.model)
    libraries = compare(small)
    report.table(
        "Compiling a schema, and the masks of one step (median over the tokens of a text)", LIBRARY_COLUMNS, libraries
    )
    shape, _ = load_config(args.model)
    eos = shape.eos_ids or frozenset({0})
    compiler = Compiler(lambda: Vocabulary.build(*small, eos, shape.vocab_size), eos)
    compiler.prepare(ENDLESS).result()

    def sampler(ops: ModuleType) -> GrammarSampler:
        return GrammarSampler(GumbelSampler(ops), compiler)

    config = cli.config(args)
    rows = throughput(build_rank(config, join(1, config.device), sampler), args)
    report.table(f"{args.model}: {args.requests} requests, {args.tokens} tokens each", COLUMNS, rows)
    if args.save:
        tables = {"libraries": {"columns": LIBRARY_COLUMNS, "rows": libraries}, "columns": COLUMNS, "rows": rows}
        report.save(__file__, "grammar", args, tables)


def throughput(engine: Engine, args) -> list[list]:
    """A row for free requests, for requests with a grammar, and for half of each; all in one run, in turn."""
    kinds = {"free": [""], "with a grammar": [ENDLESS], "half of each": ["", ENDLESS]}
    best = dict.fromkeys(kinds, float("inf"))
    draw = random.Random(0)
    for _ in range(args.rounds + 1):  # the first one warms up: it is the slowest
        for kind, grammars in kinds.items():
            prompts = [[draw.randrange(10, 10_000) for _ in range(PROMPT)] for _ in range(args.requests)]
            params = [
                RequestParams(temperature=0.6, max_tokens=args.tokens, grammar=grammar, ignore_eos=not grammar)
                for grammar in (grammars[i % len(grammars)] for i in range(args.requests))
            ]
            start = time.perf_counter()
            reqs = engine.generate(prompts, params)
            best[kind] = min(best[kind], time.perf_counter() - start)
            assert all(len(req.output_ids) == args.tokens for req in reqs)
    tokens = args.requests * args.tokens
    return [[kind, round(s, 2), round(tokens / s), round(100 * best["free"] / s, 1)] for kind, s in best.items()]


# --- libraries ------------------------------------------------------------------------------------------------------


def compare(small: tuple[list[bytes], list[int]]) -> list[list]:
    tokens, special = small
    ours, eos = len(tokens), frozenset({special[0]} if special else {0})
    rows = []
    for size in (ours, LARGE_VOCABULARY):
        known = Vocabulary.build(larger(tokens, size), special, eos, size)
        compiler = Compiler(lambda known=known: known, eos)
        compiler.prepare('choice:["x"]').result()  # reads the vocabulary
        measured = {"llguidance": llguidance_times(compiler)}
        if importlib.util.find_spec("xgrammar"):
            measured["xgrammar"] = xgrammar_times(known, min(eos))
        ids = known(TEXT)
        for library, (compile_, masks) in measured.items():
            for name, schema in SCHEMAS.items():
                ms, compiled = timed(lambda: compile_(schema))  # noqa: B023
                steps = [masks(compiled, n, ids) if name != "200 fields" else "" for n in BATCHES]
                rows.append([library, size, name, round(ms, 2), *steps])
    return rows


def larger(tokens: list[bytes], size: int) -> list[bytes]:
    """With words made of two, as a larger vocabulary has them."""
    known, result, draw = set(tokens), list(tokens), random.Random(0)
    words = [token for token in tokens if token[:1] == b" " and len(token) > 2] or [b" a", b" b"]
    ends = [token for token in tokens if token[:1].isalpha()]
    while len(result) < size:
        token = draw.choice(words) + draw.choice(ends) + draw.choice(ends) * (len(tokens) < 1000)
        if token not in known:
            known.add(token)
            result.append(token)
    return result


def timed(work: Callable) -> tuple[float, object]:
    """(milliseconds, what it returns)"""
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


def llguidance_times(compiler: Compiler) -> tuple[Callable, Callable]:
    executor, size = LLExecutor(), compiler.tokenizer.vocab_size

    def compile_(schema: dict) -> LLMatcher:
        compiler.compiled.clear()
        return compiler.matcher("json:" + json.dumps(schema))

    def masks(compiled: LLMatcher, count: int, ids: list[int]) -> float:
        matchers, bits, times = [compiled.deep_copy() for _ in range(count)], allocate_token_bitmask(count, size), []
        work = [(matcher, i) for i, matcher in enumerate(matchers)]
        for token in ids:
            times.append(timed(lambda: fill_next_token_bitmask_par(executor, work, bits))[0])
            assert all(matcher.consume_token(token) for matcher in matchers)
        return round(float(np.median(times)), 3)

    return compile_, masks


def xgrammar_times(known: Vocabulary, eos: int) -> tuple[Callable, Callable]:
    import xgrammar

    size = len(known.tokens)
    info = xgrammar.TokenizerInfo(known.tokens, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def masks(compiled, count: int, ids: list[int]) -> float:
        matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(count)]
        bits, times = xgrammar.allocate_token_bitmask(count, size), []
        for token in ids:
            times.append(timed(lambda: [m.fill_next_token_bitmask(bits, i) for i, m in enumerate(matchers)])[0])
            assert all(matcher.accept_token(token) for matcher in matchers)
        return round(float(np.median(times)), 3)

    return lambda schema: compiler.compile_json_schema(json.dumps(schema)), masks


if __name__ == "__main__":
    cli.run(main)
