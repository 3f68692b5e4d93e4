"""The toy: same tokens with and without a cache, and FLOPs on paper equal to those that PyTorch counts."""

import pytest
import torch

from stage1_naive import toy


@pytest.mark.parametrize(("new", "past"), [(1, 0), (5, 0), (32, 0), (1, 1), (1, 40)])
def test_the_closed_form_is_what_pytorch_counts(new, past):
    assert toy.count_step(new, past) == toy.closed_form(new, past)


def test_a_generation_is_the_sum_of_its_steps():
    naive = [toy.closed_form(n, 0) for n in (3, 4, 5)]
    cached = [toy.closed_form(3, 0), toy.closed_form(1, 3), toy.closed_form(1, 4)]
    assert toy.count_generation(3, 3, cached=False).total == sum(step.total for step in naive)
    assert toy.count_generation(3, 3, cached=True).total == sum(step.total for step in cached)


def test_attention_grows_one_power_faster_than_the_projections():
    small, large = toy.count_generation(1, 2000, cached=False), toy.count_generation(1, 4000, cached=False)
    assert large.attention / small.attention == pytest.approx(8, rel=0.01)
    assert large.projections / small.projections == pytest.approx(4, rel=0.01)


def test_both_ways_give_the_same_tokens(monkeypatch):
    monkeypatch.setattr(toy, "HIDDEN", 64)
    monkeypatch.setattr(toy, "HEADS", 4)
    torch.manual_seed(0)
    model, prompt = toy.DemoGPT().eval(), torch.randint(0, toy.VOCAB, (7,))
    naive, cached = (generate(model, prompt, 20) for generate in (toy.generate_naive, toy.generate_cached))
    assert torch.equal(naive, cached)
    assert len(naive) == 27
    assert torch.equal(naive[:7], prompt)
