"""SamplingParams: what a request wants."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from operator import index

from common.config import UserError, check_range

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below this a draw is the argmax; dividing by it would overflow
MAX_TEMPERATURE = 1e6  # long before this all tokens are equally likely
MAX_COUNT = 2**31 - 1
NUMBERS = {  # field -> (kind, lowest, highest)
    "temperature": (float, 0, MAX_TEMPERATURE),
    "top_k": (int, -1, MAX_COUNT),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "seed": (int, None, None),
    "repetition_penalty": (float, 0, math.inf),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "max_tokens": (int, 1, MAX_COUNT),
    "min_tokens": (int, 0, MAX_COUNT),
}
OPTIONAL, POSITIVE = ("seed", "logprobs", "prompt_logprobs"), ("repetition_penalty",)


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop. Raises UserError for a value out of range."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0 or -1: all
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability (nucleus); 0: the likeliest
    min_p: float = 0.0  # only tokens at least this likely, relative to the likeliest
    seed: int | None = None
    repetition_penalty: float = 1.0  # > 1 discourages every token of prompt and output (Keskar et al., 2019)
    presence_penalty: float = 0.0  # subtracted once from the logit of every token in the output
    frequency_penalty: float = 0.0  # subtracted once for every time that it is there
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # log-probabilities of the chosen token and of this many likeliest ones
    prompt_logprobs: int | None = None  # the same of every token of the prompt but the first
    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    min_tokens: int = 0  # no eos and no stop token before so many
    ignore_eos: bool = False

    def __post_init__(self):
        """NumPy's numbers become Python's, which fit into any message."""
        for name, (kind, low, high) in NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if type(value) is not kind and not isinstance(value, Integral if kind is int else Real):
                raise UserError(f"{name} is {value!r}; it must be a {'whole number' if kind is int else 'number'}")
            if low is not None:
                check_range(name, value, low, high, open_low=name in POSITIVE)
            if type(value) is not kind:
                object.__setattr__(self, name, kind(value))
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}; max_tokens allows no more than {self.max_tokens}")
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias is {self.logit_bias!r:.80}; it must be a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_range(f"logit_bias of token {token}", bias, -100, 100)
        bias = zip(token_ids(self.logit_bias, "logit_bias"), map(float, self.logit_bias.values()), strict=True)
        object.__setattr__(self, "logit_bias", dict(bias))
        object.__setattr__(self, "stop_token_ids", frozenset(token_ids(self.stop_token_ids, "stop_token_ids")))

    @cached_property
    def deterministic(self) -> bool:
        """The likeliest token, always."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1 or self.top_p == 0

    @cached_property
    def filters(self) -> bool:
        """Are unlikely tokens ruled out before a draw?"""
        return not self.deterministic and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def adjusts(self) -> bool:
        """Are single logits changed?"""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0

    @cached_property
    def needs_text(self) -> bool:
        """Has the host to know every token before the next one can be sampled? Penalties count what is there already."""
        return any((self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty))

    @cached_property
    def plain(self) -> bool:
        """The likeliest token, or one draw from the model's logits, is all it takes."""
        return not self.filters and not self.adjusts and self.logprobs is None


def token_ids(values: Iterable[int], name: str) -> list[int]:
    """The values as Python's whole numbers. Raises UserError for anything else, such as text."""
    try:
        return [index(value) for value in values]
    except TypeError as error:
        raise UserError(f"{name} must be token ids, which are whole numbers, not {values!r:.80}") from error


def check_vocab(params: SamplingParams, vocab_size: int) -> None:
    """UserError for a token id that the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"{name} names token {token}; the model has tokens 0 to {vocab_size - 1}")
