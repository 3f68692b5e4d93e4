"""From a grammar, as a request states it, to a matcher: what says, token by token, which tokens may come next.

The work is done by llguidance. It is bounded (`limits`), whatever a request states: a grammar that would take more is
refused, and says so. Compiling takes a millisecond, but before the first one the vocabulary has to be read, which takes
seconds. So it happens in a thread, and whoever waits for a grammar waits without holding up others.
"""

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.config import UserError
from stage9_server.grammar import MAX_GRAMMAR

MAX_KEPT = 64  # compiled grammars
MAX_STATES = 10_000  # of a lexer, 1 to 2 kB each
VOCABULARY_TIMEOUT = 120  # seconds
NO_TEXT = b"\xff"  # in front of a token that stands for no text: no grammar can ask for this byte
JSON_RULES = {"whitespace_pattern": r"[ \n]{1,16}"}  # a weak model would put blanks until its tokens are used up


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
            if matcher.is_error():
                raise UserError(f"the grammar can't be used: {matcher.get_error().strip():.500}")
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


def limits() -> LLParserLimits:
    """Of one grammar: its size, and what a step may take. (A JSON schema of 200 fields needs a tenth of it.)"""
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=500,
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
        return KINDS[kind](text)
    except Exception as error:  # whatever the library makes of what it did not expect
        raise UserError(f"the {kind} grammar can't be read: {str(error) or type(error).__name__:.500}") from error


def choice_grammar(texts: str) -> str:
    """One of several literal texts, given as a JSON list."""
    choices = json.loads(texts)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise UserError("it must be a list of texts, at least one")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


KINDS = {
    "json": partial(LLMatcher.grammar_from_json_schema, overrides=JSON_RULES),  # a JSON schema
    "regex": LLMatcher.grammar_from_regex,
    "choice": choice_grammar,
    "ebnf": lambda text: LLMatcher.grammar_from_lark(gbnf_to_lark(text)),  # as llama.cpp and xgrammar write it
    "lark": LLMatcher.grammar_from_lark,
}


def read_vocabulary(model: str, eos_ids: frozenset[int], size: int) -> Vocabulary:
    """Of the model's tokenizer, in a process of its own: its library takes seconds to import, and this one has a loop."""
    command = [sys.executable, "-m", "stage9_server.grammar.vocabulary", model]
    found = subprocess.run(command, capture_output=True, timeout=VOCABULARY_TIMEOUT)
    if found.returncode:
        raise UserError(f"the model's vocabulary can't be read: {found.stderr.decode(errors='replace')[-300:]}")
    return Vocabulary.build(*msgspec.msgpack.decode(found.stdout), eos_ids, size)
