"""The default model, many kinds of prompts, every stage's engine: all greedy texts must be Hugging Face's, in float32.

    python -m tests.differential                          # 200 prompts through all stages: an hour on two cores
    python -m tests.differential --stages 5 8 --prompts 40

For every prompt that an engine continues differently it shows the first token that differs, and by how much Hugging
Face's logit of its own choice exceeds that of the other one. Both sum up in another order, so a gap below NEAR is a tie
that either may win: it is shown and counted, but is no error. Any other difference makes the status 1.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from common.checkpoint import load
from common.config import EngineConfig
from common.fetch import fetch_default
from common.tokenizer import Tokenizer, load_tokenizer
from stage1_naive.generate import generate
from stage2_req import build as stage2
from stage2_req.params import SamplingParams
from stage3_kvcache import build as stage3
from stage4_batch import build as stage4
from stage5_paged import build as stage5
from stage6_cudagraph import build as stage6
from stage7_radix import build as stage7
from stage8_tp import build as stage8

NEAR = 1e-3
BUILDERS = {2: stage2, 3: stage3, 4: stage4, 5: stage5, 6: stage6, 7: stage7, 8: stage8}
TEXTS = {
    "prose": ["Once upon a time, a small robot", "The capital of France is", "It was a bright cold day in April, and"],
    "code": [
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n",
        "SELECT name, count(*) FROM orders\n  WHERE total > 3.14\n  GROUP BY",
        '{"id": 12345, "tags": ["a", "b"], "next": null, "price":',
    ],
    "CJK": ["从零实现一个推理引擎,第一步是", "吾輩は猫である。名前はまだ無い。", "서울은 대한민국의 수도이며"],
    "emoji": ["🙂🙃😉 👩‍👩‍👧‍👦 means", "I ❤️ 🍕 and 🍣, but not 🥦 because", "🇫🇷🇯🇵🇰🇷🇨🇳"],
    "others": ["Привет, как дела?", "مرحبا بالعالم", "  \n\n\t  x\r\n", "0.1 + 0.2 = 0.30000000000000004\n1,234,567 -", "ﬁ ① Å é"],
}  # fmt: skip


class Case(NamedTuple):
    kind: str
    ids: list[int]
    max_tokens: int


class Difference(NamedTuple):
    case: Case
    index: int  # of the first token that differs
    expected: int | None  # None: the text has ended
    got: int | None
    gap: float  # of the logits of the two


def make_cases(tokenizer: Tokenizer, count: int, max_len: int, max_tokens: int, seed: int = 0) -> list[Case]:
    """Prompts of all kinds in turns; the longest leave no room for all their tokens."""
    draw, cases = random.Random(seed), []

    def some_text() -> str:
        return draw.choice(TEXTS[draw.choice([*TEXTS])])

    def ids_of(length: int) -> list[int]:
        ids = []
        while len(ids) < length:
            ids += tokenizer.encode(some_text() + " ")
        return ids[:length]

    makers = {
        **{kind: lambda kind=kind: tokenizer.encode(draw.choice(TEXTS[kind])) for kind in TEXTS},
        "mixed": lambda: tokenizer.encode(" ".join(some_text() for _ in range(3))),
        "chat": lambda: tokenizer.chat([{"role": "user", "content": some_text()}]),
        "repeated": lambda: (tokenizer.encode(some_text())[-draw.randint(1, 4) :] * max_len)[: draw.randint(20, 80)],
        "random ids": lambda: [draw.randrange(49152) for _ in range(draw.randint(1, 40))],
        "one token": lambda: [draw.randrange(49152)],
        "long": lambda: ids_of(draw.randint(max_len // 4, max_len // 2)),
        "near the end": lambda: ids_of(max_len - draw.randint(0, max_tokens)),
    }
    for i in range(count):
        kind = [*makers][i % len(makers)]
        ids = makers[kind]()[-max_len:]
        cases.append(Case(kind, ids, min(max_tokens, max_len - len(ids) + 1)))  # the last token needs no slot
    return cases


class HuggingFace:
    def __init__(self):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(fetch_default(), dtype=torch.float32).eval()

    @torch.inference_mode()
    def text(self, case: Case) -> list[int]:
        ids = torch.tensor([case.ids])
        settings = {"max_new_tokens": case.max_tokens, "do_sample": False}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(case.ids) :].tolist()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[V], of the token that comes next."""
        return self.model(torch.tensor([ids])).logits[0, -1]


def answerer(stage: int, max_len: int) -> Callable[[list[Case]], list[list[int]]]:
    """A stage's texts for cases, all of them at once where it can; a pool of two long texts makes it hard."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=max_len,
        max_running=8,
        max_batch_tokens=96,
        page_size=4,
        kv_tokens=2 * max_len // 4 * 4,
        graph=True,
    )
    if stage == 1:
        m = load(config)
        return lambda cases: [[*generate(m.model, m.kernels, case.ids, case.max_tokens)] for case in cases]
    engine = BUILDERS[stage].build_engine(config)

    def answer(cases: list[Case]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=case.max_tokens) for case in cases]
        return [req.output_ids for req in engine.generate([case.ids for case in cases], params)]

    return answer


def compare(hf: HuggingFace, case: Case, expected: list[int], got: list[int]) -> Difference | None:
    if expected == got:
        return None
    pairs = [*zip(expected, got, strict=False)]
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b = (text[index] if index < len(text) else None for text in (expected, got))
    gap = float("inf")
    if a is not None and b is not None:
        logits = hf.logits(case.ids + expected[:index])
        gap = (logits[a] - logits[b]).item()
    return Difference(case, index, a, b, gap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, *BUILDERS], choices=[1, *BUILDERS])
    parser.add_argument("--max-len", type=int, default=256, help="prompt and output together, in tokens")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = make_cases(load_tokenizer("smollm2-135m"), args.prompts, args.max_len, max(1, args.max_tokens), args.seed)
    start, hf = time.perf_counter(), HuggingFace()
    expected = [hf.text(case) for case in cases]
    print(f"Hugging Face: {sum(map(len, expected))} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    errors = 0
    for stage in args.stages:
        start, texts = time.perf_counter(), answerer(stage, args.max_len)(cases)
        found = [d for c, e, t in zip(cases, expected, texts, strict=True) if (d := compare(hf, c, e, t))]
        ties = sum(d.gap < NEAR for d in found)
        print(
            f"stage {stage}: {len(cases) - len(found)} of {len(cases)} equal, {ties} differ at a tie, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        for d in found:
            print(f"  {d.case.kind}: token {d.index} is {d.got}, not {d.expected}; the logits' gap is {d.gap:.2g}")
        errors += len(found) - ties
    return min(errors, 1)


if __name__ == "__main__":
    sys.exit(main())
