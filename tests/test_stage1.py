"""Stage 1: the naive loop gives Hugging Face's greedy text, token by token, and stops where it should."""

import itertools

import pytest

from common.checkpoint import load
from stage1_naive.generate import generate
from tests.conftest import CHECKPOINTS, copy_with_eos, reference


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("length", [1, 2, 31])
def test_text_is_hugging_faces(name, length, tiny_checkpoint):
    tiny = tiny_checkpoint(name)
    loaded = load(tiny.config())
    prompt = tiny.prompt(length)
    tokens = list(generate(loaded.model, loaded.kernels, prompt, 32))
    assert tokens == reference(tiny, prompt, 32)
    assert all(type(token) is int for token in tokens)


def test_tokens_come_one_by_one(llama):
    loaded, prompt = load(llama.config()), llama.prompt(8)
    endless = generate(loaded.model, loaded.kernels, prompt, 10**9)
    assert list(itertools.islice(endless, 3)) == reference(llama, prompt, 3)


def test_the_prompt_is_left_as_it_was(llama):
    loaded, prompt = load(llama.config()), llama.prompt(8)
    assert list(generate(loaded.model, loaded.kernels, prompt, 0)) == []
    list(generate(loaded.model, loaded.kernels, prompt, 2))
    assert prompt == llama.prompt(8)


def test_any_eos_token_is_the_last(llama, tmp_path):
    prompt = llama.prompt(8)
    text = reference(llama, prompt, 24)
    absent = next(token for token in range(llama.vocab_size) if token not in text)
    folder = copy_with_eos(llama, tmp_path / "eos", [absent, text[6]])
    loaded = load(llama.config(model=str(folder)))
    assert list(generate(loaded.model, loaded.kernels, prompt, 24)) == text[: text.index(text[6]) + 1]
