"""Text to token ids and back."""

import codecs
import re
from functools import cached_property
from pathlib import Path

from common.config import UserError
from common.fetch import resolve_model


def _gpt2_bytes() -> dict[str, int]:
    """The alphabet of byte-level BPE: a printable character for every byte, itself where it is printable in Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


GPT2_BYTES = _gpt2_bytes()


class Tokenizer:
    """A thin wrapper of the checkpoint's own tokenizer."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # takes seconds to import: not before it is needed

        self.hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.known: dict[tuple[int, bool], bytes] = {}  # what token_bytes has found out already

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the model's own start token (once) where it has one and `special` is set."""
        spelt_out = bool(self.hf.bos_token) and text.startswith(self.hf.bos_token)
        return self.hf.encode(text, add_special_tokens=special and not spelt_out)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation ([{"role": …, "content": …}, …]), ready for the assistant's answer."""
        if not self.hf.chat_template:
            raise UserError("the model has no chat template; give it plain text instead")
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    @cached_property
    def longest_token(self) -> int:
        """Bytes, at most; a text of more than n times as many has more than n tokens."""
        return max(map(len, self.hf.get_vocab()))

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """What a token adds to a text under way, maybe a part of a character; nothing if it is a special one to skip."""
        key = token, skip_special
        if key not in self.known:
            before = self.decode([self.anchor])
            text = self.decode([self.anchor, token], skip_special=skip_special).removeprefix(before)
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

    @cached_property
    def strips_space(self) -> bool:
        """Does decode drop a space at the start of a text?"""
        ids = self.encode("a a", special=False)
        return self.decode(ids).encode() != b"".join(map(self.token_bytes, ids))


class IncrementalDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character; together exactly `decode` of them all.

    A token is a few bytes of UTF-8, so a piece costs the same however long the text is, and at most the three bytes of
    an incomplete character are held back. (One exception: tokenizers with <0xNN> tokens, such as Llama 2's, decode a run of those
    that ends in an invalid byte as if all of the run were invalid, also what could be read long before.)
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
        self.at_start = tokenizer.strips_space

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        data = self.tokenizer.token_bytes(token)
        if data and self.at_start:
            data, self.at_start = data.removeprefix(b" "), False
        return self.utf8.decode(data)

    def flush(self) -> str:
        """What was held back: nothing, or a replacement character. Call it once, at the end."""
        return self.utf8.decode(b"", True)


def load_tokenizer(name: str) -> Tokenizer | None:
    """None for a dummy model, which has no text."""
    return None if name.startswith("dummy:") else Tokenizer(resolve_model(name))
