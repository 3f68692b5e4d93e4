"""What a model says to itself, in <think>…</think>, apart from what it says to the client."""

from stage9_server.text import overlap

START, END = "<think>", "</think>"


class Plain:
    """The null form: all is content. What parsers of an answer's text have in common: pieces of text in, fields of a chat's
    message (or delta) out.
    """

    def push(self, text: str, last: bool = False) -> dict[str, str]:
        """last: nothing follows."""
        return {"content": text} if text else {}


class Thinking:
    """Splits the text of one choice. Half a tag is held back, and blank space in front of the answer is dropped."""

    def __init__(self, inside: bool):
        """inside: the prompt has opened the tag already."""
        self.state, self.held = "inside" if inside else "before", ""

    def push(self, text: str, last: bool = False) -> dict[str, str]:
        self.held, out = self.held + text, {}
        if self.state == "before":
            begin = self.held.lstrip()
            if START.startswith(begin) and begin != START and not last:
                return out
            self.state = "inside" if begin.startswith(START) else "after"
            if self.state == "inside":
                self.held = begin.removeprefix(START)
        if self.state == "inside":
            thought, found, rest = self.held.partition(END)
            shown = len(thought) - (0 if found or last else overlap(thought, END))
            if thought[:shown]:
                out["reasoning_content"] = thought[:shown]
            self.held = rest if found else thought[shown:]
            if not found:
                return out
            self.state = "gap"
        if self.state == "gap":
            self.held = self.held.lstrip()
            if not self.held:
                return out
            self.state = "after"
        if self.held:
            out["content"], self.held = self.held, ""
        return out
