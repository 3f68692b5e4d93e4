"""From a sequence's tokens to the text that a client may see."""

from itertools import compress

from common.tokenizer import IncrementalDecoder
from stage9_server.messages import TextOptions


class StopStrings:
    """Lets text through up to the first stop string that becomes complete, wherever pieces of text end.

    What could be the beginning of a stop string is held back until that is settled. Of two that are complete at the same
    character, the longer one counts. With `include` it is let through itself.
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop, self.include, self.held = stop, include, ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, is a stop string complete?)"""
        if not self.stop:
            return text, False
        text = self.held + text
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            return text[: end if self.include else start], True
        keep = len(text) - max(overlap(text, stop) for stop in self.stop)
        self.held = text[keep:]
        return text[:keep], False


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, and not all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


class TextStream:
    """One sequence: tokens in, text out. The prompt's text, where it is asked for, comes first and is not looked through.

    What is not shown (special tokens, and the one that ends the text) is searched all the same if a stop string names a
    special token.
    """

    def __init__(self, tokenizer, options: TextOptions, echo_ids: list[int]):
        self.options = options
        self.decoder = IncrementalDecoder(tokenizer, options.skip_special)
        self.stop = StopStrings(options.stop, options.include_stop)
        if (
            options.continues and not echo_ids
        ):  # no beginning: a tokenizer that drops the space in front of one keeps it
            self.decoder.at_start = False
        self.echo = "".join(map(self.decoder.push, echo_ids))
        self.tokens, special = 0, tokenizer.special_tokens
        self.named = any(text in string for string in options.stop for text in special.values())
        self.special: dict[int, str] = special if self.named else {}  # token -> its text, where that is searched
        self.visible: list[bool] = []  # which of the characters that are held back may be shown

    def push(self, token: int, last: bool = False) -> tuple[str, bool]:
        """(text to show, is a stop string complete?). last: this token ends the text by what it is."""
        hide, self.tokens = last and not self.options.include_stop, self.tokens + 1
        if self.tokens < self.options.min_tokens:
            return self.decoder.push(token), False
        hidden = self.special.get(token, "")
        if hidden and (hide or self.options.skip_special):  # no character goes on behind it
            return self.search(self.decoder.flush(), hidden)
        return ("", False) if hide else self.search(self.decoder.push(token))

    def search(self, text: str, hidden: str = "") -> tuple[str, bool]:
        """As StopStrings.push, for text that may be shown and text behind it that may not."""
        if not self.named:
            return self.stop.push(text)
        self.visible += [True] * len(text) + [False] * len(hidden)
        passed, stopped = self.stop.push(text + hidden)
        shown = "".join(compress(passed, self.visible))
        del self.visible[: len(passed)]
        return shown, stopped

    def flush(self) -> tuple[str, bool]:
        """The rest, when no further token comes."""
        text, stopped = self.search(self.decoder.flush())
        if stopped:
            return text, True
        held = self.stop.held
        return text + ("".join(compress(held, self.visible)) if self.named else held), False
