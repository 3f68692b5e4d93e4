"""The default model's tokenizer splits digits one by one, loses no text, and renders chats as transformers does; the
incremental decoder gives the whole text in pieces that never end inside a character.
"""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.config import UserError
from common.tokenizer import IncrementalDecoder, Tokenizer

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "emoji 😀 family 👨‍👩‍👧‍👦 flag 🇩🇪 thumbs 👍🏽",
    "中文与日本語、한국어。",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items()}  # ok\r\n",
    "cafe\u0301 n\u0303 a\u0308\u0323 ZWNJ\u200c nbsp\u00a0",
    "العربية עברית हिन्दी ไทย",
    "12345 3.14 1e-9 2024-01-02",
    "don't can't . , ! ?  it 's",
    "\x00\x01 control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return Tokenizer(default_model)


def pieces(tokenizer, ids) -> tuple[list[str], str]:
    """What each push gave, and what was left for the flush."""
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(token) for token in ids], decoder.flush()


@pytest.mark.parametrize("text", ["12345", "3.14", "a1b22c", "in 1999 there were 365 days", "0007"])
def test_every_digit_is_a_token(tokenizer, text):
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
    assert "".join(tokens) == text
    assert [token for token in tokens if any(c.isdigit() for c in token)] == [c for c in text if c.isdigit()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("messages", [
    [{"role": "user", "content": "What is 12345?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 😀"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
])  # fmt: skip
def test_chat_is_the_template_of_the_folder(tokenizer, default_model, messages):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(default_model)
    ids = tokenizer.chat(messages)
    assert ids == hf.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert all(type(token) is int for token in ids)
    text = tokenizer.decode(ids, skip_special=False)
    assert text.endswith("<|im_start|>assistant\n")
    assert all(message["content"] in text for message in messages)


def test_special_tokens_can_be_shown_or_hidden(tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert "<|im_start|>" in tokenizer.decode(ids, skip_special=False)
    assert "<|im_start|>" not in tokenizer.decode(ids)


def test_no_chat_template(tokenizer, default_model, tmp_path):
    import shutil

    folder = tmp_path / "plain"
    shutil.copytree(default_model, folder, ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    with pytest.raises(UserError, match="chat template"):
        Tokenizer(folder).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_valid_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pushed, rest = pieces(tokenizer, ids)
    assert "".join(pushed) == text  # all of it before the flush
    assert rest == ""
    assert "\ufffd" not in "".join(pushed)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_pieces_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids) == text)  # the vocabulary lacks a few bytes: control and unassigned characters
    pushed, rest = pieces(tokenizer, ids)
    assert ("".join(pushed), rest) == (text, "")


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=40))
def test_pieces_of_any_tokens(tokenizer, ids):
    """The first ids are special tokens and single bytes: incomplete and invalid UTF-8 are among these lists."""
    pushed, rest = pieces(tokenizer, ids)
    assert "".join(pushed) + rest == tokenizer.decode(ids)


def test_half_a_character_is_held_back_until_it_is_whole_or_the_end(tokenizer):
    ids = tokenizer.encode("𐍈")
    assert len(ids) > 1
    pushed, rest = pieces(tokenizer, ids)
    assert (pushed, rest) == ([""] * (len(ids) - 1) + ["𐍈"], "")
    pushed, rest = pieces(tokenizer, ids[:-1])
    assert (set(pushed), set(rest)) == ({""}, {"\ufffd"})


def test_a_piece_costs_the_same_however_long_the_text_is(tokenizer):
    decoded = []

    class Counting:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    pieces(Counting(), tokenizer.encode("All work and no play makes Jack a dull boy. " * 20))
    assert max(decoded) < 10
