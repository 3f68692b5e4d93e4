"""The lab, chapter 1: the naive loop."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stage1_naive.generate import generate
from tests.lab.learner import attention, cpu_kernels, expect, expect_close

SIZE = 50


class Successor(nn.Module):
    """A model that continues 7 with 8. It notes what it is given, and calls attention as a layer does."""

    def __init__(self, eos: int = -1):
        super().__init__()
        self.norm, self.config, self.passes = nn.LayerNorm(SIZE), SimpleNamespace(eos_ids=frozenset([eos])), []

    def forward(self, ids, positions, attend):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(len(ids), heads, 8, generator=generator) for heads in (4, 2, 2))
        mixed = attend(0, q, k, v)
        self.passes.append(SimpleNamespace(ids=ids.tolist(), positions=positions.tolist(), qkv=(q, k, v), mixed=mixed))
        return F.one_hot((ids + 1) % SIZE, SIZE).float()

    def head(self, hidden):
        return hidden


def run(prompt: list[int], max_tokens: int, eos: int = -1) -> tuple[list[int], list]:
    """The tokens, and what every pass was about."""
    model = Successor(eos)
    return list(generate(model, cpu_kernels(), prompt, max_tokens)), model.passes


class Test_1_1:
    """generate"""

    def test_every_token_follows_from_the_one_before(self):
        expect("generate, prompt [20, 7], max_tokens 3, a model that counts", run([20, 7], 3)[0], [8, 9, 10])

    def test_every_pass_computes_the_whole_text(self):
        expect("ids of the passes", [p.ids for p in run([20, 7], 3)[1]], [[20, 7], [20, 7, 8], [20, 7, 8, 9]])

    def test_positions_count_from_0(self):
        expect("positions of the passes", [p.positions for p in run([20, 7], 2)[1]], [[0, 1], [0, 1, 2]])

    def test_no_position_sees_a_later_one(self):
        only = run([5, 6, 7, 8, 9], 1)[1][0]
        expect_close("what the call-back returns for 5 positions", only.mixed, attention(*only.qkv))

    def test_an_end_token_is_the_last_one(self):
        expect("generate, prompt [7], end token 9", run([7], 5, eos=9)[0], [8, 9])

    def test_tokens_come_one_by_one(self):
        model = Successor()
        tokens = generate(model, cpu_kernels(), [7], 3)
        expect("the first token", next(tokens), 8)
        expect("the passes until then", len(model.passes), 1)
