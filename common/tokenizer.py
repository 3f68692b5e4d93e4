"""Text to token ids and back."""

from pathlib import Path

from common.config import UserError


class Tokenizer:
    """A thin wrapper of the checkpoint's own tokenizer."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # takes seconds to import: not before it is needed

        self.hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the model's own start token where it has one and `special` is set."""
        return self.hf.encode(text, add_special_tokens=special)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation ([{"role": …, "content": …}, …]), ready for the assistant's answer."""
        if not self.hf.chat_template:
            raise UserError("the model has no chat template; give it plain text instead")
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


class IncrementalDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character.

    Two marks divide the ids: text before `read` is out; decoding starts at `prefix`, a little earlier, because a
    token's text can depend on its left neighbour. So a token costs the same however long the text is
    (the scheme of Hugging Face's text-generation-inference).
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids = tokenizer, []
        self.prefix = self.read = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        self.ids.append(token)
        text = self._fresh()
        if not text or text.endswith("\ufffd"):
            return ""
        self.prefix, self.read = self.read, len(self.ids)
        return text

    def flush(self) -> str:
        """What was held back, replacement characters and all. Call it once, at the end."""
        text = self._fresh()
        self.prefix, self.read = self.read, len(self.ids)
        return text

    def _fresh(self) -> str:
        before = self.tokenizer.decode(self.ids[self.prefix : self.read])
        return self.tokenizer.decode(self.ids[self.prefix :])[len(before) :]
