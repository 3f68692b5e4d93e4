"""Calls of tools: read from a model's text however it is cut into pieces, told to models that know none, and their grammar."""

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from stage9_server.grammar.compiler import Vocabulary, translated
from stage9_server.openai_api.reasoning import Plain, Thinking
from stage9_server.openai_api.tools import FORMATS, Then, ToolCalls, calls_grammar, explained, format_of, told
from tests.conftest import PROFILE

HERMES, LLAMA = FORMATS["hermes"], FORMATS["llama3_json"]
AND = '{"name": "f", "arguments": {"a": "}\\" ]"}}'
CASES = {  # text, format -> content, [(name, arguments)]
    "one call": (f"<tool_call>\n{AND}\n</tool_call>", HERMES, "", [("f", '{"a": "}\\" ]"}')]),
    "content in front": (
        f"Let me see. <tool_call>{AND}</tool_call>",
        HERMES,
        "Let me see. ",
        [("f", '{"a": "}\\" ]"}')],
    ),
    "two calls": (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"x": [1, {}]}}\n</tool_call>',
        *(HERMES, "", [("f", "{}"), ("g", '{"x": [1, {}]}')]),
    ),
    "cut off in its arguments": ('<tool_call>{"name": "f", "arguments": {"a": 1', HERMES, "", [("f", '{"a": 1')]),
    "cut off in its tag": ("text <tool_ca", HERMES, "text <tool_ca", []),
    "cut off in its head": ('<tool_call>{"name": "f', HERMES, '<tool_call>{"name": "f', []),
    "a tag and no call": ("<tool_call>what?</tool_call> x", HERMES, "<tool_call>what?</tool_call> x", []),
    "no call": ("a < b, {}", HERMES, "a < b, {}", []),
    "llama": ('{"name": "f", "parameters": {"a": {"b": "{"}}}', LLAMA, "", [("f", '{"a": {"b": "{"}}')]),
    "two of llama": (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
        *(LLAMA, "", [("f", "{}"), ("g", '{"y": 2}')]),
    ),
    "llama in words": ("I think {} is nice", LLAMA, "I think {} is nice", []),
    "llama with JSON that is no call": ('{"answer": 42}', LLAMA, '{"answer": 42}', []),
}


def read(parser, pieces) -> tuple[str, list[tuple[str, str]]]:
    """As a client puts the deltas together."""
    content, calls = "", []
    for i, piece in enumerate(pieces):
        parts = parser.push(piece, i == len(pieces) - 1)
        content += parts.get("content", "")
        for call in parts.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"].startswith("call_") and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, [tuple(call) for call in calls]


@pytest.mark.parametrize("case", CASES)
def test_calls_are_read_from_any_pieces(case):
    text, how, content, calls = CASES[case]
    assert read(ToolCalls(how), [text]) == (content, calls)
    assert read(ToolCalls(how), list(text)) == (content, calls)
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=4))
        assert read(ToolCalls(how), [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == (
            content,
            calls,
        )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(PROFILE)
@given(
    calls=st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=3),
    how=st.sampled_from([HERMES, LLAMA]),
    size=st.integers(1, 7),
)
def test_arguments_come_through_as_they_were_written(calls, how, size):
    written = [json.dumps({"name": "f", how.arguments: arguments}) for arguments in calls]
    text = how.between.join(how.begin + call + how.end for call in written)
    content, found = read(ToolCalls(how), [text[i : i + size] for i in range(0, len(text), size)])
    assert content == "" and [json.loads(arguments) for _, arguments in found] == calls


def test_thoughts_come_first():
    text = "<think>I call <tool_call></think>\n\n" + CASES["one call"][0]
    for parser in (Then(Thinking(False), ToolCalls(HERMES)), Then(Plain(), ToolCalls(HERMES))):
        deltas = [parser.push(char, i == len(text) - 1) for i, char in enumerate(text)]
        assert sum(len(delta.get("tool_calls", [])) > 0 for delta in deltas) > 3 or isinstance(parser.first, Plain)
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thoughts == ("I call <tool_call>" if isinstance(parser.first, Thinking) else "")


TOOLS = [
    {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"name": "g", "parameters": None},
    {"name": "tree", "parameters": {"$ref": "#/$defs/t", "$defs": {"t": {
        "type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}, "additionalProperties": False}}}},
]  # fmt: skip


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_what_the_grammar_allows_the_parser_reads(how):
    """Random walks along the masks, over the printable characters."""
    characters = [bytes([byte]) for byte in range(32, 127)] + [b"\n"]
    vocabulary = Vocabulary.build(characters, [], frozenset({96}), 97)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=97, eos_token=[96])
    seen = set()
    for seed in range(12):
        draw = random.Random(seed)
        matcher = LLMatcher(tokenizer, translated(calls_grammar(TOOLS, how, several=seed % 2 == 0)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        text, token = b"", None
        while token != 96 and len(text) < 2000:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(97) if mask[i // 8] >> i % 8 & 1]
            ends = [i for i in allowed if i == 96 or characters[i] in b'"}']  # or it would take long
            token = draw.choice(ends if ends and draw.random() < 0.6 else allowed)
            matcher.consume_token(token)
            text += b"" if token == 96 else characters[token]
        content, calls = read(ToolCalls(how), [text.decode()])
        assert content == "" and calls and (seed % 2 == 0 or len(calls) == 1)
        for name, arguments in calls:
            schema = next(tool for tool in TOOLS if tool["name"] == name)["parameters"] or {"properties": {}}
            named = {"additionalProperties": False} if "properties" in schema else {}  # and no others
            jsonschema.validate(json.loads(arguments), {"type": "object"} | schema | named)
            seen.add(name)
    assert len(seen) > 1


def test_a_model_that_knows_no_tools_is_told_in_words():
    tools = [{"type": "function", "function": {"name": "f", "description": "does it"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    messages = explained([told(message, HERMES) for message in chat], tools, HERMES)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert '"description": "does it"' in messages[0]["content"] and "<tool_call>" in messages[0]["content"]
    assert read(ToolCalls(HERMES), [messages[2]["content"]]) == ("", [("f", '{"a": 1}')])
    assert "42" in messages[3]["content"] and all("tool_calls" not in message for message in messages)
    own = explained([{"role": "system", "content": "Be kind."}], tools, HERMES)
    assert len(own) == 1 and own[0]["content"].startswith("Be kind.\n\n")


def test_the_format_is_read_off_the_template():
    assert format_of('{% if tools %}<tool_call>\n{"name": ...}') == "hermes"
    assert format_of('{"name": "f", "parameters": {dictionary}} {% if tools %}') == "llama3_json"
    assert format_of("") == "hermes"
