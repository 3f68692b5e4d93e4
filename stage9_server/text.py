"""From a sequence's tokens to the text that a client may see."""

from itertools import compress

from common.tokenizer import IncrementalDecoder


class StopStrings:
    """Lets text through up to the first stop string that becomes complete, wherever pieces of text end.

    What could be the beginning of a stop string is held back until that is settled. Of two that are complete at the same
    character, the longer one counts.
    """

    def __init__(self, stop: list[str]):
        self.stop, self.held = stop, ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, is a stop string complete?)"""
        if not self.stop:
            return text, False
        text = self.held + text
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], True
        keep = len(text) - max(self.overlap(text, stop) for stop in self.stop)
        self.held = text[keep:]
        return text[:keep], False

    @staticmethod
    def overlap(text: str, stop: str) -> int:
        """Length of the longest end of text that is a beginning of stop, and not all of it."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return len(text) - at if at >= 0 else 0


class TextStream:
    """One sequence: tokens in, text out. The prompt's text, where it is asked for, comes first and is not looked through.

    Special tokens are not shown. If a stop string names one, the text that is searched has them all the same.
    continues: the text is no beginning, so a tokenizer that drops the space in front of one keeps it.
    """

    def __init__(self, tokenizer, stop: list[str], echo_ids: list[int], continues: bool = False):
        self.decoder, self.stop = IncrementalDecoder(tokenizer), StopStrings(stop)
        if continues and not echo_ids:
            self.decoder.at_start = False
        self.echo = "".join(map(self.decoder.push, echo_ids))
        special = tokenizer.special_tokens
        named = any(text in string for string in stop for text in special.values())
        self.special: dict[int, str] = special if named else {}  # token -> its text, where that is searched
        self.visible: list[bool] = []  # which of the characters that are held back may be shown

    def push(self, token: int) -> tuple[str, bool]:
        """(text to show, is a stop string complete?)"""
        if not self.special:
            return self.stop.push(self.decoder.push(token))
        if hidden := self.special.get(token, ""):  # no character goes on behind it
            return self.search(self.decoder.flush(), hidden)
        return self.search(self.decoder.push(token), "")

    def search(self, text: str, hidden: str) -> tuple[str, bool]:
        """As StopStrings.push, for text that may be shown and text behind it that may not."""
        self.visible += [True] * len(text) + [False] * len(hidden)
        passed, stopped = self.stop.push(text + hidden)
        shown = "".join(compress(passed, self.visible))
        del self.visible[: len(passed)]
        return shown, stopped

    def flush(self) -> tuple[str, bool]:
        """The rest, when no further token comes."""
        if not self.special:
            text, stopped = self.stop.push(self.decoder.flush())
            return (text, True) if stopped else (text + self.stop.held, False)
        text, stopped = self.search(self.decoder.flush(), "")
        return (text, True) if stopped else (text + "".join(compress(self.stop.held, self.visible)), False)
