"""Text to token ids and back."""

import codecs
import json
import re
from functools import cached_property
from inspect import signature
from pathlib import Path

from common.config import UserError
from common.fetch import first_line, resolve_model

VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))  # one of these has to be there


def _gpt2_bytes() -> dict[str, int]:
    """The alphabet of byte-level BPE: a printable character for every byte, itself where it is printable in Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


GPT2_BYTES = _gpt2_bytes()


class Tokenizer:
    """A thin wrapper of the checkpoint's own tokenizer. Raises UserError if the folder has none that can be used."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # takes seconds to import: not before it is needed

        if not any(all((folder / name).is_file() for name in names) for names in VOCABULARIES):
            raise UserError(f"{folder} has no tokenizer.json, which turns text into tokens; fetch it again")
        try:
            self.hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self.hf.encode("a")  # some mistakes show only here
        except Exception as error:  # whatever the library makes of what it did not expect
            raise UserError(f"{what_is_broken(folder, error)}; fetch it again") from error
        self.known: dict[tuple[int, bool, bool], bytes] = {}  # what token_bytes has found out already

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the model's own start token (once) where it has one and `special` is set."""
        spelt_out = bool(self.hf.bos_token) and text.startswith(self.hf.bos_token)
        return self.hf.encode(text, add_special_tokens=special and not spelt_out)

    @property
    def template(self) -> str:
        """For chats; empty if there is none."""
        return str(self.hf.chat_template or "")

    @property
    def knows_tools(self) -> bool:
        """Does the chat template show tools to the model?"""
        return "tools" in self.template

    def chat(self, messages: list[dict], variables: dict | None = None, tools: list[dict] | None = None) -> list[int]:
        """Token ids of a conversation ([{"role": …, "content": …}, …]), ready for the assistant's answer.

        variables: for the template, such as {"enable_thinking": False}.
        """
        from jinja2 import TemplateError

        if not self.template:
            raise UserError("the model has no chat template; give it plain text instead")
        variables = variables or {}
        if taken := variables.keys() & signature(self.hf.apply_chat_template).parameters.keys():
            raise UserError(f"{min(taken)} is no variable of a chat template; leave it out")
        try:
            return self.hf.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, return_dict=True, **variables
            )["input_ids"]  # fmt: skip
        except TemplateError as error:
            raise UserError(f"the model's chat template fails: {first_line(error)}") from error

    def thinking(self, ids: list[int]) -> bool | None:
        """Does this conversation, as `chat` made it, end inside <think>? None if the template knows no such thing."""
        if "<think>" not in self.template:
            return None
        return self.decode(ids[-16:], skip_special=False).rstrip().endswith("<think>")

    @cached_property
    def longest_token(self) -> int:
        """Bytes, at most; a text of more than n times as many has more than n tokens."""
        return max(map(len, self.hf.get_vocab()))

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that decode leaves out, and their text."""
        return {token: added.content for token, added in self.hf.added_tokens_decoder.items() if added.special}

    def token_bytes(self, token: int, *, skip_special: bool = True, first: bool = False) -> bytes:
        """What a token adds to a text under way, maybe a part of a character; nothing if it is a special one to skip.

        first: what a text is that begins with it. Some tokenizers drop one space there, some every space of the token.
        """
        key = token, skip_special, first
        if key not in self.known:
            before = [] if first else [self.anchor]
            text = self.decode([*before, token], skip_special=skip_special).removeprefix(self.decode(before))
            self.known[key] = text.encode() if "\ufffd" not in text else self._raw_bytes(token, text)
        return self.known[key]

    def _raw_bytes(self, token: int, text: str) -> bytes:
        """Of a token that is no text by itself: the vocabulary spells its bytes, as <0xNN> or in GPT-2's alphabet."""
        name = self.hf.convert_ids_to_tokens(token)
        if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(match[1])
        return bytes(map(GPT2_BYTES.get, name)) if GPT2_BYTES.keys() >= set(name) else text.encode()

    @cached_property
    def anchor(self) -> int:
        """A token with a space in front: decoded at the start of a text, some tokenizers drop the space, elsewhere none."""
        return self.encode("a a", special=False)[-1]


class IncrementalDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character; together exactly `decode` of them all.

    A token is a few bytes of UTF-8, so a piece costs the same however long the text is, and at most the three bytes of
    an incomplete character are held back. (One exception: tokenizers with <0xNN> tokens, such as Llama 2's, decode a run of those
    that ends in an invalid byte as if all of the run were invalid, also what could be read long before.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self.tokenizer, self.utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
        self.skip_special, self.at_start = skip_special, True

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        data = self.tokenizer.token_bytes(token, skip_special=self.skip_special)
        if data and self.at_start:  # special tokens have no text, and the start is still to come
            data, self.at_start = self.tokenizer.token_bytes(token, skip_special=self.skip_special, first=True), False
        return self.utf8.decode(data)

    def flush(self) -> str:
        """What was held back: nothing, or a replacement character. At the end, or where a character can't go on."""
        return self.utf8.decode(b"", True)


def what_is_broken(folder: Path, error: Exception) -> str:
    """Which of its files keeps a tokenizer from being loaded, and why."""
    import tokenizers

    for file in sorted([*folder.glob("*.json"), *folder.glob("*.jinja")]):
        try:
            content = file.read_text()
            if file.suffix == ".json":
                json.loads(content)
            if file.name == "tokenizer.json":
                tokenizers.Tokenizer.from_str(content)
        except Exception as found:  # the library knows only this kind
            return f"{file} can't be read ({first_line(found)})"
    what = f"the tokenizer in {folder} can't be used as its tokenizer_config.json describes it"
    return f"{what} ({type(error).__name__}: {first_line(error)})"


def load_tokenizer(name: str) -> Tokenizer | None:
    """None for a dummy model, which has no text."""
    return None if name.startswith("dummy:") else Tokenizer(resolve_model(name))
