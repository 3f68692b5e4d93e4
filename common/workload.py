"""The benchmark workloads, seeded: the same everywhere."""

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
