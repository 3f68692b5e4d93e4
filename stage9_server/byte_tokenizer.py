"""A stand-in for `dummy:` models, which have no tokenizer: every byte is a token."""


class ByteTokenizer:
    """The interface of common.tokenizer.Tokenizer. Ids from 256 on, which such a model draws too, are shown as numbers."""

    longest_token = 1
    template, knows_tools = "", False

    def __init__(self):
        self.special_tokens: dict[int, str] = {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def chat(self, messages: list[dict], variables: dict | None = None, tools: list[dict] | None = None) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def thinking(self, ids: list[int]) -> bool | None:
        return None

    def token_bytes(self, token: int, *, skip_special: bool = True, first: bool = False) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")
