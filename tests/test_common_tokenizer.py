"""The default model's tokenizer splits digits one by one, loses no text, and renders chats as transformers does; the
incremental decoder gives the whole text in pieces that never end inside a character; of every kind of tokenizer a prompt
has one start token, and files that are missing or broken are named.
"""

import json
import shutil

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from common.config import UserError
from common.tokenizer import GPT2_BYTES, IncrementalDecoder, Tokenizer
from stage9_server.messages import TextOptions
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
        def token_bytes(self, token, skip_special=True, first=False):
            if not first:
                asked.append(token)
            return tokenizer.token_bytes(token, skip_special=skip_special, first=first)

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
    assert TextStream(byte_fallback, TextOptions(), []).push(token) == ("a", False)
    assert TextStream(byte_fallback, TextOptions(continues=True), []).push(token) == (" a", False)
    echoed = TextStream(byte_fallback, TextOptions(continues=True), [token])
    assert echoed.echo + echoed.push(token)[0] == "a a"


def saved(model, folder, **options) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    model.add_special_tokens(["<s>", "</s>"])
    model.add_tokens(["<t中ol>"])
    options = {"bos_token": "<s>", "eos_token": "</s>"} | options
    PreTrainedTokenizerFast(tokenizer_object=model, **options).save_pretrained(folder)
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


# --- Metaspace: a mark in place of every space. At the start of a text decode drops those of the whole first token ---


def metaspace(folder, scheme: str, **options) -> Tokenizer:
    """T5's kind (Unigram) with words in which the mark is at all places."""
    words = ["<unk>", "▁", "a", "▁a", "▁▁", "▁▁▁", "b▁c", "a▁", "é", "▁中", "\ufffd"]
    model = tokenizers.Tokenizer(models.Unigram([(word, -1.0 - i) for i, word in enumerate(words)], unk_id=0))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    model.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return saved(model, folder, unk_token="<unk>", **options)


@pytest.fixture(scope="module")
def metaspaces(tmp_path_factory):
    return {name: metaspace(tmp_path_factory.mktemp(name), name) for name in ("first", "always", "never")}


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 13), max_size=12))
@example(ids=[4, 2])  # "▁▁", "a"
@example(ids=[6, 6])  # a mark inside the first word
@example(ids=[11, 0, 5, 1, 3])  # behind special tokens, which do not count as the first
@example(ids=[13, 3])  # an added word comes first
def test_any_tokens_of_a_metaspace_tokenizer(metaspaces, scheme, ids):
    pushed, rest = pieces(metaspaces[scheme], ids)
    assert "".join(pushed) + rest == metaspaces[scheme].decode(ids)


def test_a_text_that_goes_on_keeps_every_mark(metaspaces):
    double, inner = (metaspaces["first"].hf.convert_tokens_to_ids(word) for word in ("▁▁", "b▁c"))
    assert TextStream(metaspaces["first"], TextOptions(), []).push(inner) == ("bc", False)
    assert TextStream(metaspaces["first"], TextOptions(continues=True), []).push(inner) == ("b c", False)
    assert TextStream(metaspaces["first"], TextOptions(continues=True), []).push(double) == ("  ", False)


# --- start tokens ---


def byte_words(*added: str) -> tokenizers.Tokenizer:
    """Byte-level, with the given start and end tokens put around a text."""
    model = tokenizers.Tokenizer(models.BPE(dict(GPT2_BYTES), []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    if added:
        ids = [(word, model.token_to_id(word)) for word in added]
        text = " ".join(["$A" if word == "text" else word for word in ("<s>", "text", *added[1:])])
        model.post_processor = processors.TemplateProcessing(single=text, special_tokens=ids)
    return model


KINDS = {  # name -> (what the tokenizer puts around a text, its settings)
    "adds it": (("<s>",), {"bos_token": "<s>"}),  # Llama, Mistral
    "adds it and an end": (("<s>", "</s>"), {"bos_token": "<s>"}),
    "has one and does not add it": ((), {"bos_token": "<s>"}),  # the default model
    "has none": ((), {"bos_token": None}),  # Qwen
    "adds one that it does not call so": (("<s>",), {"bos_token": None}),
}
TEMPLATES = {
    "with it": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "without it": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> tuple[Tokenizer, tuple[str, ...]]:
    added, options = KINDS[request.param]
    return saved(byte_words(*added), tmp_path_factory.mktemp("kind"), **options), added


def test_a_text_gets_one_start_token(kind):
    tokenizer, added = kind
    start, end = (tokenizer.hf.convert_tokens_to_ids(word) for word in ("<s>", "</s>"))
    hi = [GPT2_BYTES.get(c, ord(c)) for c in "hi"]
    assert tokenizer.encode("hi") == [start] * ("<s>" in added) + hi + [end] * ("</s>" in added)
    assert tokenizer.encode("hi", special=False) == hi
    assert tokenizer.encode("<s>hi", special=False) == [start, *hi]
    assert tokenizer.encode("hi<s>hi", special=False) == [*hi, start, *hi]
    if tokenizer.hf.bos_token:  # else nothing says that it is the start token
        assert tokenizer.encode("<s>hi") == [start, *hi]
    assert tokenizer.encode("<s>hi").count(start) == 1 + ("<s>" in added and not tokenizer.hf.bos_token)
    inside = tokenizer.encode("hi<s>hi")  # elsewhere than at the start it is text like any other
    assert (inside.count(start), inside[0] == start) == (1 + ("<s>" in added), "<s>" in added)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_has_the_start_tokens_of_its_template(kind, template, monkeypatch):
    tokenizer, _ = kind
    start, end = (tokenizer.hf.convert_tokens_to_ids(word) for word in ("<s>", "</s>"))
    monkeypatch.setattr(tokenizer.hf, "chat_template", TEMPLATES[template])
    first = [start] if template == "with it" and tokenizer.hf.bos_token else []
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids[: len(first)] == first
    assert (ids.count(start), ids.count(end)) == (len(first), 0)
    assert tokenizer.chat([{"role": "user", "content": "<s>hi"}]).count(start) == len(first) + 1  # as it was sent


# --- files that are missing or broken ---


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def change(name: str, **fields):
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))


BROKEN = {  # what is done to the folder -> the file that is named
    "gone": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "gone, of a class that begins with nothing": (
        lambda folder: ((folder / "tokenizer.json").unlink(), change("tokenizer_config.json", tokenizer_class="LlamaTokenizer")(folder)),
        "tokenizer.json",
    ),
    "half": (lambda folder: (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:2000]), "tokenizer.json"),
    "empty": (write("tokenizer.json", b""), "tokenizer.json"),
    "no object": (write("tokenizer.json", b"[]"), "tokenizer.json"),
    "without a model": (write("tokenizer.json", b"{}"), "tokenizer.json"),
    "no text": (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json"),
    "a pointer to a large file": (write("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"), "tokenizer.json"),
    "another model": (change("tokenizer.json", model={"type": "Other", "vocab": {}}), "tokenizer.json"),
    "half a config": (write("tokenizer_config.json", b'{"eos_token": '), "tokenizer_config.json"),
    "config of another kind": (write("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "a class that is a number": (change("tokenizer_config.json", tokenizer_class=5), "tokenizer_config.json"),
    "an end that is a number": (change("tokenizer_config.json", eos_token=5), "tokenizer_config.json"),
    "a length that is a text": (change("tokenizer_config.json", model_max_length="long"), "tokenizer_config.json"),
    "half a map": (write("special_tokens_map.json", b"{"), "special_tokens_map.json"),
    "a template that is no text": (write("chat_template.jinja", b"\xff"), "chat_template.jinja"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_in_one_line(case, byte_level, tmp_path):
    damage, name = BROKEN[case]
    folder = tmp_path / "model"
    shutil.copytree(byte_level.hf.name_or_path, folder)
    damage(folder)
    with pytest.raises(UserError) as found:
        Tokenizer(folder)
    message = str(found.value)
    assert str(folder) in message and name in message and message.endswith("fetch it again")
    assert "\n" not in message


def test_a_template_that_fails_is_an_error_of_the_user(byte_level, monkeypatch):
    for template in ("{% for m in", "{{ raise_exception('no') }}", "{{ messages.nothing.more }}"):
        monkeypatch.setattr(byte_level.hf, "chat_template", template)
        with pytest.raises(UserError, match="chat template fails"):
            byte_level.chat([{"role": "user", "content": "hi"}])
