"""A handful of what `python -m tests.differential` does, and that it sees a difference."""

import pytest

from common.tokenizer import load_tokenizer
from tests.differential import Case, HuggingFace, answerer, compare, make_cases

MAX_LEN, COUNT = 40, 12


@pytest.fixture(scope="module")
def hf(default_model):
    return HuggingFace()


@pytest.fixture(scope="module")
def answers(hf):
    """One case of every kind, and Hugging Face's texts."""
    cases = make_cases(load_tokenizer("smollm2-135m"), COUNT, MAX_LEN, 3)
    return [(case, hf.text(case)) for case in cases]


@pytest.mark.parametrize("stage", [1, 8])
def test_a_handful_of_prompts(hf, answers, stage):
    cases = [case for case, _ in answers]
    assert len({case.kind for case in cases}) == len(cases)
    texts = answerer(stage, MAX_LEN)(cases)
    assert [compare(hf, case, text, got) for (case, text), got in zip(answers, texts, strict=True)] == [None] * COUNT


def test_the_first_difference_and_its_gap(hf):
    case = Case("prose", [10, 20, 30], 4)
    text = hf.text(case)
    best, second = hf.logits(case.ids + text[:2]).topk(2)[0].tolist()
    runner_up = hf.logits(case.ids + text[:2]).topk(2)[1][1].item()
    difference = compare(hf, case, text, [*text[:2], runner_up, text[3]])
    assert (difference.index, difference.expected, difference.got) == (2, text[2], runner_up)
    assert difference.gap == pytest.approx(best - second)
    assert compare(hf, case, text, text[:3]) == (case, 3, text[3], None, float("inf"))
