"""From a grammar, as a request states it, to a matcher: what says, token by token, which tokens may come next.

The work is done by llguidance. It is bounded (`limits`), whatever a request states: a grammar that would take more is
refused, and says so. Compiling takes a millisecond, but before the first one the vocabulary has to be read, which takes
seconds. So it happens in a thread, and whoever waits for a grammar waits without holding up others.
"""

import json
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.config import UserError
from stage9_server.grammar import JSON_RULES, MAX_GRAMMAR

MAX_KEPT = 64  # compiled grammars
MAX_STATES = 10_000  # of a lexer, 1 to 2 kB each; and remainders that multiples are found by
VOCABULARY_TIMEOUT = 120  # seconds
NO_TEXT = b"\xff"  # in front of a token that stands for no text: no grammar can ask for this byte
MULTIPLE_OF = re.compile(r'"multipleOf": *(\d[\d.eE+-]*)')  # in a schema, wherever it stands
# A text without an alternative is drawn like any other, in the model's own tokens. Spelling it out in advance takes as long as
# the text, at every step.
UNFORCED = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens are as text. The interface that llguidance wants of a tokenizer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    @cached_property
    def ids(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data}

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids))

    def __call__(self, text: bytes) -> list[int]:
        """Some tokens that spell the text, always the longest that fits."""
        found, at = [], 0
        while at < len(text):
            size = next((n for n in range(self.longest, 0, -1) if text[at : at + n] in self.ids), 0)
            if not size:  # a byte without a token
                return found
            found.append(self.ids[text[at : at + size]])
            at += size
        return found

    @classmethod
    def build(cls, tokens: Iterable[bytes], special: Iterable[int], eos_ids: frozenset[int], size: int) -> "Vocabulary":
        """size: of the model's vocabulary, which may be longer than the tokenizer's."""
        if not eos_ids:
            raise UserError("the model has no end token, which a text with a grammar must end with")
        silent = {*special, *eos_ids}
        known = [NO_TEXT + data if token in silent else data for token, data in enumerate(tokens)]
        known += [b""] * (size - len(known))  # never allowed; copies of one token would be gone through in every mask
        return cls(known[:size], sorted(silent), min(eos_ids))


class Compiler:
    """Owns the compiled grammars. `read`: returns the vocabulary; called once, in the thread."""

    def __init__(self, read: Callable[[], Vocabulary], eos_ids: Iterable[int]):
        self.read, self.eos_ids = read, sorted(eos_ids)
        self.thread = ThreadPoolExecutor(1, "grammar")
        self.compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the one used last is the last
        self.failed: dict[
            int, str
        ] = {}  # uid -> why its text can't go on, as the sampler found; taken by `take_failed`

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        vocabulary = self.read()
        return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=self.eos_ids)

    def begin(self) -> None:
        """Read the vocabulary now, in the thread, so that the first grammar need not wait for it."""
        self.thread.submit(lambda: self.tokenizer)

    def prepare(self, grammar: str) -> Future[None]:
        """Compile it in the thread. The future raises UserError if it can't be, or may not."""
        done: Future[None] = Future()
        if grammar in self.compiled:
            done.set_result(None)
            return done
        return self.thread.submit(self.compile, grammar)

    def compile(self, grammar: str) -> None:
        if grammar not in self.compiled:
            matcher = LLMatcher(self.tokenizer, translated(grammar), log_level=0, limits=limits())
            with suppress(ValueError):
                matcher.compute_bitmask()  # the first mask, which tells whether any text fits
            if matcher.is_error():
                raise UserError(f"the grammar can't be used: {reason(matcher):.500}")
            self.compiled[grammar] = matcher
            while len(self.compiled) > MAX_KEPT:
                self.compiled.popitem(last=False)

    def take_failed(self) -> dict[int, str]:
        """uids of the last step whose grammar became too much for its limits, and why."""
        failed, self.failed = self.failed, {}
        return failed

    def matcher(self, grammar: str) -> LLMatcher:
        """A new one, at its start. If the grammar has been dropped meanwhile it is compiled again, here and now."""
        self.compile(grammar)
        self.compiled.move_to_end(grammar)
        return self.compiled[grammar].deep_copy()


def reason(matcher: LLMatcher) -> str:
    """Why it can't go on."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip().replace("NoExtensionBias", "no text fits it")


def limits() -> LLParserLimits:
    """Of one grammar: its size, and what a step may take. (A JSON schema of 200 fields needs a tenth of it.)"""
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=1_000,
        max_lexer_states=MAX_STATES,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def translated(grammar: str) -> str:
    """`kind:text` in llguidance's own form. Raises UserError."""
    kind, _, text = grammar.partition(":")
    if len(text) > MAX_GRAMMAR:
        raise UserError(f"the {kind} grammar has {len(text)} characters; {MAX_GRAMMAR} are allowed")
    try:
        if sum(map(remainders, MULTIPLE_OF.findall(text))) > MAX_STATES:
            raise UserError(f"multipleOf is too large; {MAX_STATES:,} is allowed, for all of them together")
        return LLMatcher.grammar_from_lark(UNFORCED + KINDS[kind](text))
    except Exception as error:  # whatever the library makes of what it did not expect
        raise UserError(f"the {kind} grammar can't be read: {str(error) or type(error).__name__:.500}") from error


def remainders(number: str) -> Decimal:
    """How many states the multiples of a number take: it, or its digits where it is a fraction."""
    value = Decimal(number).normalize()
    return value.scaleb(max(0, -value.as_tuple().exponent))


def json_grammar(schema: str) -> str:
    return f"start: %json {json.dumps(json.loads(schema) | JSON_RULES)}"


def regex_grammar(regex: str) -> str:
    return json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]


def choice_grammar(texts: str) -> str:
    """One of several literal texts, given as a JSON list."""
    choices = json.loads(texts)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise UserError("it must be a list of texts, at least one")
    return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, choices))


KINDS: dict[str, Callable[[str], str]] = {  # each in Lark's form, which llguidance takes
    "json": json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "ebnf": gbnf_to_lark,  # as llama.cpp and xgrammar write it
    "lark": str,
}


def read_vocabulary(model: str, eos_ids: frozenset[int], size: int) -> Vocabulary:
    """Of the model's tokenizer, in a process of its own: its library takes seconds to import, and this one has a loop."""
    command = [sys.executable, "-m", "stage9_server.grammar.vocabulary", model]
    found = subprocess.run(command, capture_output=True, timeout=VOCABULARY_TIMEOUT)
    if found.returncode:
        raise UserError(f"the model's vocabulary can't be read: {found.stderr.decode(errors='replace')[-300:]}")
    return Vocabulary.build(*msgspec.msgpack.decode(found.stdout), eos_ids, size)
