"""The default model's tokenizer splits digits one by one, loses no text, and renders chats as transformers does; the
incremental decoder gives the whole text in pieces that never end inside a character.
"""

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from common.config import UserError
from common.tokenizer import GPT2_BYTES, IncrementalDecoder, Tokenizer
from stage9_server.text import TextStream

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
    asked = []

    class Counting:
        strips_space = False

        def token_bytes(self, token):
            asked.append(token)
            return tokenizer.token_bytes(token)

    ids = tokenizer.encode("All work and no play makes Jack a dull boy. " * 20)
    assert "".join(pieces(Counting(), ids)[0]) == tokenizer.decode(ids)
    assert asked == ids  # each token is looked at once


# --- tokenizers made on the fly: every byte a token, in both spellings that the supported models use ---


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Byte-level BPE (Llama 3, Qwen): all 256 bytes and some merges; two special tokens and one added word."""
    vocab = dict(GPT2_BYTES)
    pairs = [("Ġ", "a"), ("Ã", "©"), ("ä", "¸"), ("½", "a"), ("Ġ", "ð")]  # also some that are no whole characters
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(pairs)}
    model = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return saved(model, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """Llama 2's kind: words with a space mark in front, and <0xNN> for what the vocabulary lacks."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁", "a", "▁a", "é", "▁中", "\ufffd", "▁▁"]
    model = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], byte_fallback=True)
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    return saved(model, tmp_path_factory.mktemp("byte_fallback"))


def test_a_text_that_goes_on_keeps_its_space(byte_fallback):
    token = byte_fallback.hf.convert_tokens_to_ids("▁a")
    assert TextStream(byte_fallback, [], []).push(token) == ("a", False)
    assert TextStream(byte_fallback, [], [], continues=True).push(token) == (" a", False)
    echoed = TextStream(byte_fallback, [], [token], continues=True)
    assert echoed.echo + echoed.push(token)[0] == "a a"


def saved(model, folder) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    model.add_special_tokens(["<s>", "</s>"])
    model.add_tokens(["<t中ol>"])
    PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return Tokenizer(folder)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 263), st.integers(128, 255)), max_size=60))
@example(ids=[0xE4] * 50)
@example(ids=[0xF0, 0x9F, 0x98] * 20)
@example(ids=[0xEF, 0xBF, 0xBD, 0xED, 0xA0, 0x80])  # a real replacement character, and half a surrogate pair
@example(ids=[0xE4, 262, 0xB8, 261, 0xAD])  # special tokens inside a character
def test_any_bytes_through_byte_level_tokens(byte_level, ids):
    decoder, given = IncrementalDecoder(byte_level), ""
    for n, token in enumerate(ids, 1):
        given += decoder.push(token)
        text = byte_level.decode(ids[:n])
        assert text.removeprefix(given) in ("", "\ufffd", "\ufffd" * 2)  # never more behind than a few bytes
    assert given + decoder.flush() == byte_level.decode(ids)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(st.integers(257, 266), st.characters(exclude_categories=["Cs"])), max_size=40))
@example(parts=[257, 259])
@example(parts=[" ", " "])
@example(parts=[265, " ", 259])
def test_whole_characters_through_byte_fallback_tokens(byte_fallback, parts):
    """The first space goes, as decode has it; bytes that are spelt out give characters."""
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
    pushed, rest = pieces(byte_fallback, ids)
    assert "".join(pushed) + rest == byte_fallback.decode(ids)


def test_bytes_of_a_token(byte_level, byte_fallback):
    assert byte_level.token_bytes(0xE4) == byte_fallback.token_bytes(0xE4) == b"\xe4"
    assert byte_level.token_bytes(byte_level.hf.convert_tokens_to_ids("½a")) == b"\xbda"
    assert byte_fallback.token_bytes(byte_fallback.hf.convert_tokens_to_ids("▁a")) == b" a"
    assert byte_level.token_bytes(byte_level.hf.convert_tokens_to_ids("<t中ol>")) == "<t中ol>".encode()
    end = byte_level.hf.convert_tokens_to_ids("</s>")
    assert (byte_level.token_bytes(end), byte_level.token_bytes(end, skip_special=False)) == (b"", b"</s>")
