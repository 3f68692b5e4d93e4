"""Tools: how a model is told of them, how it writes a call, and how a call is read from its text, piece by piece.

A call is a JSON object with the function's name and its arguments. Models differ in what is around it and in what they call
the arguments: that is a ToolFormat. The words of the server's flag are vLLM's and SGLang's.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from stage9_server.grammar import JSON_RULES
from stage9_server.openai_api.reasoning import Plain, Thinking
from stage9_server.text import overlap

Parts = dict[str, Any]  # fields of a chat's message, or of a delta


class ToolFormat(NamedTuple):
    begin: str  # in front of a call; empty: an answer that begins with a brace is nothing but calls
    end: str
    between: str
    arguments: str  # their name in the JSON object


FORMATS = {
    "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments"),  # Hermes, Qwen
    "llama3_json": ToolFormat("", "", "; ", "parameters"),
}
INSTRUCTIONS = """You may call these functions:
{tools}
To call one, write nothing but
{begin}{{"name": "the name", "{arguments}": {{"an argument": "its value"}}}}{end}"""
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
MAX_HEAD = 1024  # characters in which a call must say whom it calls


def format_of(template: str) -> str:
    """The name of the format that a chat template teaches its model."""
    return "llama3_json" if '"parameters": ' in template and "<tool_call>" not in template else "hermes"


def explained(messages: list[dict], tools: list[dict], how: ToolFormat) -> list[dict]:
    """For a template that knows no tools: they are described in the system's message."""
    text = INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"]) for tool in tools),
        begin=how.begin,
        end=how.end,
        arguments=how.arguments,
    )
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def told(message: dict, how: ToolFormat) -> dict:
    """For a template that knows no tools: calls and results of the past as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", [])]
    written = [json.dumps({"name": call["name"], how.arguments: call["arguments"]}) for call in calls]
    texts = [*filter(None, [message["content"]]), *(how.begin + call + how.end for call in written)]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}


def in_words(messages: list[dict], tools: list[dict], tool_format: str | None) -> list[dict]:
    """For a template that knows no tools: a chat in which they, the calls and the results are plain text. None: it does."""
    if tool_format is None:
        return messages
    how = FORMATS[tool_format]
    messages = [told(message, how) for message in messages]
    return explained(messages, tools, how) if tools else messages


def calls_grammar(tools: Sequence[dict[str, Any]], how: ToolFormat, several: bool) -> str:
    """The grammar of one call, or of one and more, of these functions ({"name", "parameters"})."""
    rules, names = [], []
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "{how.arguments}": ')
        schema = closed(tool.get("parameters") or {"type": "object", "properties": {}}) | JSON_RULES
        names.append(f"f{i}")
        rules.append(f'f{i}: {head} %json {json.dumps(schema)} "}}"')
    begin, end, between = (json.dumps(text) if text else "" for text in (how.begin, how.end, how.between))
    start = f"start: call ({between} call)*" if several else "start: call"
    return "lark:" + "\n".join([start, f"call: {begin} ({' | '.join(names)}) {end}", *rules])


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a function's parameters: none but those that it names, unless it speaks of others itself."""
    open_ = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    named_only = "properties" in schema and not open_ & schema.keys()
    return schema | {"additionalProperties": False} if named_only else schema


class ToolCalls:
    """Reads calls from the text of one choice. Text in front of a call is content. Arguments are passed on as they come; what
    begins like a call and turns out to be none is content."""

    def __init__(self, how: ToolFormat):
        self.begin, self.end = how.begin.strip(), how.end.strip()
        self.held, self.count = "", 0
        self.state = "text" if self.begin else "start"  # text | start | head | arguments | tail
        self.depth, self.quoted, self.escaped = 0, False, False  # inside the arguments

    def push(self, text: str, last: bool = False) -> Parts:
        self.held += text
        content, calls = "", {}  # index of a call -> what this piece brings of it
        going = True
        while going:
            match self.state:
                case "start":  # of an answer that may be nothing but calls
                    begin = self.held.lstrip(" \n;" if self.count else None)
                    going = bool(begin)
                    if going:
                        self.state = "head" if begin.startswith("{") else "text"
                case "text":
                    shown, found, rest = self.held.partition(self.begin) if self.begin else (self.held, "", "")
                    if not found and self.begin and not last:
                        shown = self.held[: len(self.held) - overlap(self.held, self.begin)]
                    content += shown
                    self.held = rest if found else self.held[len(shown) :]
                    self.state, going = ("head", True) if found else ("text", False)
                case "head":
                    self.held = self.held.lstrip(" \n;") if not self.begin else self.held
                    if head := HEAD.match(self.held):
                        name = json.loads(head[1], strict=False)
                        call = {"id": f"call_{uuid4().hex[:24]}", "type": "function"}
                        calls[self.count] = {"index": self.count, **call, "function": {"name": name, "arguments": ""}}
                        self.held, self.state = self.held[head.end() :], "arguments"
                        self.depth, self.quoted, self.escaped = 0, False, False
                    elif last or len(self.held) > MAX_HEAD or (self.end and self.end in self.held):
                        content += self.begin + self.held  # it is none
                        self.held, self.state, going = "", "text", False
                    else:
                        going = False
                case "arguments":
                    size, going = self.scan(self.held)
                    if size:
                        nothing = {"index": self.count, "function": {"arguments": ""}}
                        calls.setdefault(self.count, nothing)["function"]["arguments"] += self.held[:size]
                    self.held = self.held[size:]
                    if going or last:
                        self.count += 1
                        self.state = "tail"
                case "tail":  # the object's own brace, and the end tag
                    mark = self.end or "}"
                    _, found, rest = self.held.partition(mark)
                    going = bool(found)
                    if found:
                        self.held = rest.lstrip() if self.begin else rest
                        self.state = "text" if self.begin else "start"
                    elif last:
                        self.held = ""
        delta: Parts = {"content": content} if content and (content.strip() or not self.count) else {}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def scan(self, text: str) -> tuple[int, bool]:
        """How much of the text belongs to the JSON value, and does it end there?"""
        for i, char in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.quoted, self.escaped = char != '"', char == "\\"
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:  # below: the value was no object, and this is the brace around it
                    return i + (self.depth == 0), True
        return len(text), False


class Then:
    """One parser behind another: what is content for the first goes through the second."""

    def __init__(self, first: Plain | Thinking, second: ToolCalls):
        self.first, self.second = first, second

    def push(self, text: str, last: bool = False) -> Parts:
        parts = self.first.push(text, last)
        content = parts.pop("content", "")
        return parts | self.second.push(content, last)
