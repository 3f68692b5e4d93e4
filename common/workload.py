"""The benchmark workloads, seeded: the same everywhere."""

import itertools
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    prompt_ids: list[int]
    max_tokens: int


def offline(scale: float = 1.0, vocab_size: int = 10001) -> list[Item]:
    """nano-vllm's and mini-sglang's public benchmark: 256 prompts of 100 to 1024 tokens, 100 to 1024 tokens out.

    At scale 1 these are 142,827 tokens in and 133,966 out, the same ids as theirs. A smaller scale shortens the lengths
    in proportion and keeps the draws.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in prompts]
    items = []
    for prompt, length in zip(prompts, lengths, strict=True):
        kept = prompt[: max(1, round(len(prompt) * scale))]
        items.append(Item([token % vocab_size for token in kept], max(1, round(length * scale))))
    return items


def shared_prefix(
    groups: int,
    per_group: int,
    prefix_len: int,
    question_len: int,
    max_tokens: int,
    vocab_size: int = 10001,
    seed: int = 0,
) -> list[Item]:
    """`groups` system prompts of `prefix_len` tokens, each before `per_group` questions of its own; in mixed order."""
    rng = random.Random(seed)
    items = []
    for _ in range(groups):
        prefix = _tokens(rng, prefix_len, vocab_size)
        items += [Item(prefix + _tokens(rng, question_len, vocab_size), max_tokens) for _ in range(per_group)]
    rng.shuffle(items)
    return items


def multi_turn(
    conversations: int,
    turns: int,
    first_len: int,
    next_len: int,
    max_tokens: int,
    vocab_size: int = 10001,
    seed: int = 0,
) -> list[list[Item]]:
    """Conversations that grow, one list of turns each.

    An item's prompt is what the user writes in that turn: `first_len` tokens at the beginning, `next_len` in every later
    turn. The caller puts the conversation so far in front of it, the engine's own answers included.
    """
    rng = random.Random(seed)
    lengths = [first_len, *[next_len] * (turns - 1)]
    return [[Item(_tokens(rng, n, vocab_size), max_tokens) for n in lengths] for _ in range(conversations)]


def online(num_requests: int, rate: float, seed: int = 0) -> list[float]:
    """When requests arrive, in seconds, ascending: a Poisson process of `rate` requests per second."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def _tokens(rng: random.Random, n: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, 10000) % vocab_size for _ in range(n)]
