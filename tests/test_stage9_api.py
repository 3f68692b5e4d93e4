"""The API: real processes behind it for what clients see, and a hub of our own for what has to happen at an exact moment."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from stage9_server import client, load, local_server, run
from stage9_server.guard.guard import LOOPBACK, Guard, Limits
from stage9_server.hub import RequestFailed
from stage9_server.messages import (
    Detokenize,
    Detokenized,
    EngineStats,
    Piece,
    TextOptions,
    Tokenized,
    TokenLogprob,
    merged,
)
from stage9_server.observe.metrics import ITL_BUCKETS, Metrics, Watch
from stage9_server.openai_api import answers, requests
from stage9_server.openai_api.app import create_app
from stage9_server.openai_api.errors import ApiError, error_body, from_validation
from stage9_server.scheduler_worker import STATS_INTERVAL
from tests.conftest import reference

MAX_LEN, PAGE, MAX_CONCURRENT, MAX_BODY = 512, 8, 48, 100_000
HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


# --- real processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(text_checkpoint):
    flags = {
        "model": text_checkpoint.path, "port": 0, "device": "cpu", "dtype": "float32", "max-model-len": MAX_LEN,
        "page-size": PAGE, "max-concurrent": MAX_CONCURRENT, "max-body-bytes": MAX_BODY,
    }  # fmt: skip
    with local_server.running(
        *(str(word) for flag, value in flags.items() for word in (f"--{flag}", value))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(text_checkpoint) -> str:
    return str(text_checkpoint.path)


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as result:
        yield result


@pytest.fixture
def chat(api, model):
    def ask(**fields):
        fields = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 8} | fields
        return api.chat.completions.create(**fields)

    return ask


@pytest.fixture
def complete(api, model):
    def ask(prompt="hello", **fields):
        fields = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
        return api.completions.create(**fields)

    return ask


def wait_until_idle(url: str) -> dict[str, float]:
    """Nothing in flight, and every page free or only kept for later; fails if that does not come about."""
    time.sleep(1.2 * STATS_INTERVAL)  # what the scheduler has told is no older
    end = time.monotonic() + 100
    while time.monotonic() < end:
        found = local_server.metrics(url)
        idle = found["sglang:sequences_in_flight"] == 0 and found.get("sglang:num_running_reqs") == 0
        if idle and found["sglang:pages_free"] == found["sglang:pages"]:
            return found
        time.sleep(0.02)
    raise AssertionError(found)


def post(url: str, path: str, body: bytes | dict, **headers) -> tuple[int, dict, dict]:
    """(status, headers, JSON) of a request, whatever is in it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    request = urllib.request.Request(url + path, content, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def events(raw: bytes) -> list[str]:
    """The data of server-sent events; each must be one line and an empty one."""
    assert raw.endswith(b"\n\n")
    lines = raw.decode().split("\n\n")[:-1]
    assert all(re.fullmatch(r"data: [^\n]+", line) for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def raw_stream(url: str, path: str, body: dict) -> tuple[object, bytes]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return answer.headers, answer.read()


def test_chat_is_the_template_and_the_models_tokens(chat, text_checkpoint):
    answer = chat()
    prompt = [0, *text_ids("[user] hello\n[assistant] ")]
    expected = reference(text_checkpoint, prompt, 8)
    if 1 in expected:
        expected = expected[: expected.index(1)]
    choice = answer.choices[0]
    assert choice.message.content == decoded(expected)
    assert choice.message.role == "assistant"
    assert (answer.object, choice.index, choice.finish_reason) == ("chat.completion", 0, "length")
    assert answer.id.startswith("chatcmpl-") and abs(answer.created - time.time()) < 60
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
    assert answer.usage.total_tokens == len(prompt) + 8


def alphabet() -> list[int]:
    """The byte of each token from id 2 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    from common.tokenizer import GPT2_BYTES

    return [GPT2_BYTES[character] for character in sorted(ByteLevel.alphabet())]


def text_ids(text: str) -> list[int]:
    return [alphabet().index(byte) + 2 for byte in text.encode()]


def decoded(ids: list[int]) -> str:
    return bytes(alphabet()[token - 2] for token in ids if token > 1).decode(errors="replace")


@pytest.mark.parametrize("fields", [
    {}, {"temperature": 1, "seed": 3}, {"n": 3, "temperature": 1, "seed": 1}, {"max_tokens": 60},
    {"logprobs": True, "top_logprobs": 2}, {"stop": ["e", "\u00e9"]}, {"max_completion_tokens": 5, "max_tokens": None},
])  # fmt: skip
def test_a_chat_stream_is_the_whole_answer_in_pieces(chat, fields):
    whole = chat(**fields)
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "chat.completion.chunk")}
    *chunks, last = chunks
    assert last.choices == []
    usage = whole.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert entries == (choice.logprobs.content if choice.logprobs else [])


def test_completions_take_text_and_ids_and_lists_of_them(complete, text_checkpoint):
    ids = [0, *text_ids("hello")]
    alone = complete("hello")
    text = decoded(reference(text_checkpoint, ids, 8))
    assert alone.choices[0].text == text
    assert alone.object == "text_completion" and alone.id.startswith("cmpl-")
    assert complete(ids).choices[0].text == text
    other = complete("other").choices[0].text
    for prompts in (["hello", "other"], [ids, [0, *text_ids("other")]]):
        answer = complete(prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, text), (1, other)]
        assert answer.usage.prompt_tokens == 12
    chunks = list(complete(["hello", "other"], stream=True))
    for index, expected in enumerate((text, other)):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part.text for part in parts) == expected
        assert [part.finish_reason for part in parts][-1] == "length"


def test_usage_counts_a_prompt_once_and_every_choice(complete):
    answer = complete(["hello", "hi there"], n=3, temperature=1, max_tokens=5, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == list(range(6))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6 + 9, 30, 45)


def test_choices_differ_and_a_seed_repeats_them(complete):
    first, again = (complete(n=4, temperature=1, seed=5, max_tokens=12) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    assert complete(n=4, temperature=1, seed=6, max_tokens=12).choices[0].text != texts[0]


def test_max_tokens_by_default(complete, chat):
    ignore = {"extra_body": {"ignore_eos": True}}
    assert complete(max_tokens=None, **ignore).usage.completion_tokens == 16
    usage = chat(max_tokens=None, **ignore).usage
    assert usage.total_tokens in (MAX_LEN, MAX_LEN + 1)  # the last token needs no room
    assert chat(max_tokens=3, **ignore).usage.completion_tokens == 3
    assert chat(max_tokens=None, max_completion_tokens=4, **ignore).usage.completion_tokens == 4


def test_the_default_temperature_is_one(api, model):
    texts = {api.completions.create(model=model, prompt="hello").choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_stop_strings_are_never_shown(complete):
    bias = {"logit_bias": {str(token): 60 for token in text_ids("abc")}, "temperature": 1, "seed": 2, "max_tokens": 60}
    text = complete(**bias).choices[0].text
    assert set(text) == set("abc")
    for stop in (text[7:10], [text[7:10], "zzz"], text[20:45]):
        first = stop if isinstance(stop, str) else stop[0]
        answer = complete(stop=stop, **bias)
        assert answer.choices[0].text == text[: text.index(first)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == text.index(first) + len(first)
        chunks = complete(stop=stop, stream=True, **bias)
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == text[: text.index(first)]


def test_stop_tokens_and_the_end_of_the_text(complete):
    (a,) = text_ids("a")
    only = {"logit_bias": {str(a): 100}, "max_tokens": 5}
    assert complete(**only).choices[0].text == "aaaaa"
    answer = complete(extra_body={"stop_token_ids": [a]}, **only)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1
    end = complete(logit_bias={"1": 100})
    assert (end.choices[0].text, end.choices[0].finish_reason, end.usage.completion_tokens) == ("", "stop", 1)
    on = complete(logit_bias={"1": 100}, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 8)


def test_every_way_to_sample_is_honoured(complete):
    greedy = complete(max_tokens=30).choices[0].text
    hot = {"temperature": 2, "max_tokens": 30, "seed": 1}
    assert complete(**hot).choices[0].text != greedy
    for narrow in ({"top_p": 0}, {"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert complete(**narrow, **hot).choices[0].text == greedy
    a, b = text_ids("ab")
    twin = {"logit_bias": {str(a): 100, str(b): 99}, "max_tokens": 4}
    plain = complete(**twin).choices[0].text
    assert plain in ("aaaa", "bbbb")
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.1}}):
        assert set(complete(**{**twin, "max_tokens": 12}, **penalty).choices[0].text) > {plain[0]}


def test_echo(complete):
    text = complete("hello").choices[0].text
    answer = complete("hello", echo=True)
    assert answer.choices[0].text == "hello" + text
    assert answer.usage.completion_tokens == 8
    assert (
        "".join(c.text for chunk in complete("hello", echo=True, stream=True) for c in chunk.choices) == "hello" + text
    )


def test_echo_with_logprobs_of_the_prompt(complete, text_checkpoint):
    """As lm-eval asks for them; also of a prompt that is in the prefix cache already."""
    prompt = "a prompt long enough for several pages of the cache, " * 2
    ids = [0, *text_ids(prompt)]
    with torch.inference_mode():
        expected = text_checkpoint.hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    complete(prompt)
    for fields in ({"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "stream": True}, {"max_tokens": 0, "n": 2}):
        answer = complete(prompt, echo=True, logprobs=1, **fields)
        chunks = list(answer) if "stream" in fields else [answer]
        for index in range(fields.get("n", 1)):
            choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
            found = {name: [entry for c in choices if c.logprobs for entry in getattr(c.logprobs, name)]
                     for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}  # fmt: skip
            text = "".join(choice.text for choice in choices)
            assert text.startswith(prompt) and (text == prompt) == (fields["max_tokens"] == 0)
            assert len(found["tokens"]) == len(ids) + fields["max_tokens"]
            assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
            for at in range(1, len(ids)):
                assert abs(found["token_logprobs"][at] - expected[at - 1, ids[at]].item()) < 1e-3
                assert max(found["top_logprobs"][at].values()) == pytest.approx(expected[at - 1].max().item(), abs=1e-3)
                assert text[found["text_offset"][at]] == found["tokens"][at]
        if "stream" not in fields:
            assert answer.usage.completion_tokens == fields["max_tokens"] * fields.get("n", 1)
            assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_min_tokens(complete):
    end = {"logit_bias": {"1": 100}, "temperature": 1, "seed": 1}
    assert complete(**end).usage.completion_tokens == 1
    assert complete(**end, extra_body={"min_tokens": 5}).usage.completion_tokens == 6
    (a,) = text_ids("a")
    only = {"logit_bias": {str(a): 100}, "stop": "aa"}
    assert complete(**only).choices[0].text == ""
    answer = complete(**only, extra_body={"min_tokens": 5})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("aaaa", "stop")


def test_what_ends_a_text_may_be_part_of_it(complete):
    (a,) = text_ids("a")
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        only = {"logit_bias": {str(a): 100}, "stop": "aa", "extra_body": {name: True}}
        assert complete(**only).choices[0].text == "aa"
        assert "".join(c.text for chunk in complete(stream=True, **only) for c in chunk.choices) == "aa"
    end = {"logit_bias": {"1": 100}}
    shown = {"skip_special_tokens": False}
    assert complete(**end, extra_body=shown).choices[0].text == ""
    assert complete(**end, extra_body=shown | {"include_stop_str_in_output": True}).choices[0].text == "</s>"
    assert complete(**end, max_tokens=2, extra_body=shown | {"ignore_eos": True}).choices[0].text == "</s></s>"
    assert complete(**end, max_tokens=2, extra_body={"ignore_eos": True}).choices[0].text == ""


def test_usage_in_every_chunk(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(stream=True, stream_options=options, extra_body={"ignore_eos": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] >= 1
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[0].usage.prompt_tokens}


def test_logprobs_of_a_chat(chat):
    answer = chat(logprobs=True, top_logprobs=3, max_tokens=20)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == answer.choices[0].message.content
    )
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0  # temperature 0
        assert entry.token == entry.top_logprobs[0].token
    assert all(entry.top_logprobs == [] for entry in chat(logprobs=True).choices[0].logprobs.content)
    assert chat().choices[0].logprobs is None


def test_logprobs_of_a_completion(complete):
    bias = {str(token): 60 for token in text_ids("ab\u00e9")}  # the last one is two tokens
    for seed in range(50):
        fields = {"logprobs": 2, "max_tokens": 30, "temperature": 1, "seed": seed, "logit_bias": bias}
        answer = complete(**fields)
        text, found = answer.choices[0].text, answer.choices[0].logprobs
        if "\u00e9" in text:
            break
    rows = list(zip(found.tokens, found.text_offset, found.token_logprobs, found.top_logprobs, strict=True))
    assert len(rows) == 30
    assert found.text_offset == sorted(found.text_offset)
    assert {token for token in found.tokens if token not in "ab"} == {"bytes:\\xc3", "bytes:\\xa9"}
    for token, offset, logprob, top in rows:
        assert top[token] == logprob <= 0
        assert 2 <= len(top) <= 3
        assert text[offset] == token if token in "ab" else text[offset] in "\u00e9\ufffd"
    chunks = [choice for chunk in complete(stream=True, **fields) for choice in chunk.choices]
    assert [o for choice in chunks if choice.logprobs for o in choice.logprobs.text_offset] == found.text_offset


def test_cached_tokens_and_the_salt(complete):
    prompt = "a prefix that several of us have in common, long enough for some pages. " * 2
    cached = [
        complete(prompt + end, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
        for end, salt in (("one", ""), ("two", ""), ("two", "mine"), ("one", "mine"))
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] == (len(prompt) + 1) // PAGE * PAGE


def test_messages_in_parts_and_roles(chat, server, model):
    def tokens(messages):
        return post(server.url, "/tokenize", {"model": model, "messages": messages})[2]["tokens"]

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokens([{"role": "user", "content": parts}]) == tokens([{"role": "user", "content": "one\ntwo"}])
    said = [{"role": "developer", "content": "brief"}, *HELLO, chat().choices[0].message.model_dump(), *HELLO]
    ids = tokens(said)
    assert ids[: len(ids) // 4] == [0, *text_ids("[system] brief\n[user] hello\n[assistant]")][: len(ids) // 4]
    assert chat(messages=said).usage.prompt_tokens == len(ids)


def test_tokenize_and_back(server, model):
    for text in ("hello", "\u4f60\u597d \U0001f600", ""):
        status, _, answer = post(server.url, "/tokenize", {"model": model, "prompt": text})
        assert (status, answer["tokens"]) == (200, [0, *text_ids(text)])
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
        _, _, plain = post(server.url, "/tokenize", {"prompt": text, "add_special_tokens": False})
        assert plain["tokens"] == text_ids(text)
        assert post(server.url, "/detokenize", {"tokens": plain["tokens"]})[2] == {"text": text}
    _, _, answer = post(server.url, "/tokenize", {"messages": HELLO})
    assert answer["tokens"].count(0) == 1  # one start token


def test_models(api, model):
    (card,) = api.models.list().data
    assert (card.id, card.object, card.max_model_len) == (model, "model", MAX_LEN)
    assert api.models.retrieve(model) == card
    with pytest.raises(openai.NotFoundError) as error:
        api.models.retrieve("gpt-5")
    assert error.value.code == "model_not_found"


def test_answers_have_no_field_that_openai_does_not_know(server, model):
    def unknown(thing):
        assert not thing.model_extra, thing
        for _, value in thing:
            for item in value if isinstance(value, list) else [value]:
                if hasattr(item, "model_extra"):
                    unknown(item)

    body = {"model": model, "messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    unknown(ChatCompletion.model_validate(post(server.url, CHAT, body)[2], strict=True))
    unknown(Completion.model_validate(post(server.url, TEXT, {"model": model, "prompt": "x", "logprobs": 1})[2]))
    _, raw = raw_stream(server.url, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    for data in events(raw)[:-1]:
        unknown(ChatCompletionChunk.model_validate(json.loads(data), strict=True))


def test_the_bytes_of_a_stream(server, model):
    (a,) = text_ids("a")
    body = {"model": model, "messages": HELLO, "max_tokens": 3, "stream": True, "logit_bias": {str(a): 100}}
    headers, raw = raw_stream(server.url, CHAT, body)
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    *chunks, done = events(raw)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert all(list(chunk) == ["id", "object", "created", "model", "choices"] for chunk in chunks)
    assert all(chunk["model"] == model for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    none = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first == none | {"delta": {"role": "assistant", "content": "", "refusal": None}}
    assert "".join(choice["delta"]["content"] for choice in middle) == "aaa"
    assert all(choice == none | {"delta": choice["delta"]} for choice in middle)
    assert last == none | {"delta": {}, "finish_reason": "length"}
    _, raw = raw_stream(server.url, CHAT, body | {"stream_options": {"include_usage": True}})
    *chunks, usage, done = [json.loads(chunk) if chunk != "[DONE]" else chunk for chunk in events(raw)]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")


BAD = {
    # of the body
    "no JSON": (CHAT, b'{"model": ', None),
    "empty body": (CHAT, b"", None),
    "a list": (CHAT, b"[]", None),
    "a word": (TEXT, b'"prompt"', None),
    "no UTF-8": (TEXT, b'{"prompt": "\xff"}', None),
    "half a surrogate pair": (TEXT, b'{"model": "%b", "prompt": "\\ud800"}', None),
    "NaN": (TEXT, b'{"model": "%b", "prompt": "x", "temperature": NaN}', "temperature"),
    "infinity": (TEXT, b'{"model": "%b", "prompt": "x", "top_p": -Infinity}', "top_p"),
    "too deep": (CHAT, b"[" * 5000, None),
    # of fields
    "no model": (CHAT, {"model": None}, "model"),
    "model is a number": (CHAT, {"model": 1}, "model"),
    "no messages": (CHAT, {"messages": None}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "messages are text": (CHAT, {"messages": "hello"}, "messages"),
    "a message is text": (CHAT, {"messages": ["hello"]}, "messages.0"),
    "wrong role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    "no role": (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    "no content": (CHAT, {"messages": [*HELLO, {"role": "user", "content": None}]}, "messages.1"),
    "content is a number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "a picture": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
    "the template fails": (CHAT, {"messages": [{"role": "user", "content": "fail"}]}, None),
    "no prompt": (TEXT, {"prompt": None}, "prompt"),
    "empty prompt list": (TEXT, {"prompt": []}, "prompt"),
    "empty list of ids": (TEXT, {"prompt": [[]]}, None),
    "prompt is an object": (TEXT, {"prompt": {"text": "x"}}, "prompt"),
    "mixed prompt": (TEXT, {"prompt": [1, "x"]}, "prompt.0.ids.1"),
    "negative id": (TEXT, {"prompt": [-1]}, "prompt.0.ids.0"),
    "id beyond the vocabulary": (TEXT, {"prompt": [100_000]}, None),
    "huge id": (TEXT, {"prompt": [2**70]}, "prompt.0.ids.0"),
    "id is a fraction": (TEXT, {"prompt": [1.5]}, "prompt.0.ids.0"),
    "prompt too long": (TEXT, {"prompt": "x" * (MAX_LEN + 44)}, None),
    "chat too long": (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, None),
    "too many sequences": (TEXT, {"prompt": ["x"] * 17, "n": 16}, "n"),
    "temperature is text": (CHAT, {"temperature": "1"}, "temperature"),
    "temperature is true": (CHAT, {"temperature": True}, "temperature"),
    "negative temperature": (CHAT, {"temperature": -0.1}, "temperature"),
    "temperature too high": (CHAT, {"temperature": 2.1}, "temperature"),
    "infinite by overflow": (TEXT, b'{"model": "%b", "prompt": "x", "temperature": 1e999}', "temperature"),
    "top_p below 0": (TEXT, {"top_p": -0.1}, "top_p"),
    "top_p above 1": (TEXT, {"top_p": 1.1}, "top_p"),
    "top_k below -1": (TEXT, {"top_k": -2}, "top_k"),
    "top_k is a fraction": (TEXT, {"top_k": 1.5}, "top_k"),
    "min_p above 1": (TEXT, {"min_p": 1.5}, "min_p"),
    "n of 0": (CHAT, {"n": 0}, "n"),
    "n of 17": (CHAT, {"n": 17}, "n"),
    "max_tokens of 0": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "negative max_tokens": (TEXT, {"max_tokens": -1}, "max_tokens"),
    "max_tokens is a fraction": (TEXT, {"max_tokens": 1.5}, "max_tokens"),
    "presence_penalty": (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty": (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    "repetition_penalty": (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    "bias is a list": (CHAT, {"logit_bias": [1]}, "logit_bias"),
    "bias of a word": (CHAT, {"logit_bias": {"hello": 1}}, "logit_bias.hello.[key]"),
    "bias too strong": (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    "bias beyond the vocabulary": (CHAT, {"logit_bias": {"999999": 1}}, None),
    "too many biases": (CHAT, {"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    "empty stop": (TEXT, {"stop": ""}, "stop.0"),
    "stop is a number": (TEXT, {"stop": 5}, "stop"),
    "too many stops": (TEXT, {"stop": ["x"] * 17}, "stop"),
    "stop too long": (TEXT, {"stop": ["x" * 257]}, "stop.0"),
    "stop_token_ids beyond the vocabulary": (TEXT, {"stop_token_ids": [999_999]}, None),
    "negative stop_token_ids": (TEXT, {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    "seed is text": (TEXT, {"seed": "7"}, "seed"),
    "huge seed": (TEXT, {"seed": 2**70}, "seed"),
    "top_logprobs without logprobs": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "too many top_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "logprobs of a chat is a number": (CHAT, {"logprobs": 2}, "logprobs"),
    "logprobs of a text is true": (TEXT, {"logprobs": True}, "logprobs"),
    "max_tokens of 0 without echo": (TEXT, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    "stream is text": (CHAT, {"stream": "yes"}, "stream"),
    "stream_options without stream": (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    "ids without a list": ("/detokenize", {"tokens": 5}, "tokens"),
    "ids beyond the vocabulary": ("/detokenize", {"tokens": [2**40]}, "tokens.0"),
    "nothing to tokenize": ("/tokenize", {}, "prompt"),
    "two things to tokenize": ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
    # of OpenAI's fields
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    "a tool that is not there": (
        *(CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ),
    "tool_choice": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "min_tokens": (CHAT, {"min_tokens": 20, "max_tokens": 10}, None),
    "two grammars": (TEXT, {"guided_regex": "a+", "ebnf": "b"}, "response_format"),
    "a grammar that is none": (TEXT, {"regex": "(a"}, None),
    "what no grammar can do": (TEXT, {"json_schema": {"type": "array", "uniqueItems": True}}, None),
    "a grammar without its end": (TEXT, {"regex": "a+", "ignore_eos": True}, "ignore_eos"),
    "a long grammar": (TEXT, {"json_schema": {"const": "x" * 70_000}}, None),
    "beam search": (TEXT, {"use_beam_search": True}, "use_beam_search"),
    "functions": (CHAT, {"functions": [{}]}, "functions"),
    "function_call": (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    "XML answers": (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    "a schema that is missing": (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    "audio": (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    "a voice": (CHAT, {"audio": {"voice": "x"}}, "audio"),
    "prediction": (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    "reasoning": (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    "verbosity": (CHAT, {"verbosity": "low"}, "verbosity"),
    "web search": (CHAT, {"web_search_options": {}}, "web_search_options"),
    "best_of": (TEXT, {"best_of": 2}, "best_of"),
    "suffix": (TEXT, {"suffix": "end"}, "suffix"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(server, model, case):
    path, body, param = BAD[case]
    if isinstance(body, dict):
        good = {CHAT: {"model": model, "messages": HELLO}, TEXT: {"model": model, "prompt": "x"}}
        body = {
            name: value for name, value in (good.get(path, {}) | body).items() if value is not None or "content" in case
        }
    elif b"%b" in body:
        body = body % model.encode()
    status, _, answer = post(server.url, path, body)
    assert status == 400, answer
    assert list(answer) == ["error"] and list(answer["error"]) == ["message", "type", "param", "code"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert (answer["error"]["param"] or "").startswith(param or ""), answer
    assert (answer["error"]["param"] is None) == (param is None), answer
    assert len(answer["error"]["message"]) > 15
    if isinstance(body, dict) and path in (CHAT, TEXT) and "without stream" not in case:  # before a stream begins
        assert post(server.url, path, {"stream": True} | body)[0] == 400


def test_bad_requests_leave_nothing_behind(server, chat):
    wait_until_idle(server.url)
    assert chat().usage.completion_tokens == 8


@settings(max_examples=80, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from([*requests.ChatRequest.model_fields, *requests.CompletionRequest.model_fields, "role", "content", "type"])
        | st.text(max_size=5), inner, max_size=6),
    max_leaves=12,
))  # fmt: skip
def test_whatever_comes_is_a_request_or_an_error_of_the_client(value):
    for kind in (
        requests.ChatRequest,
        requests.CompletionRequest,
        requests.GenerateRequest,
        requests.TokenizeRequest,
        requests.DetokenizeRequest,
    ):
        try:
            request = checked(kind, json.loads(json.dumps(value)))
        except ApiError as error:
            assert error.status_code == 400
            json.loads(error_body(error))
        else:
            if issubclass(kind, requests.Sampling):
                assert request.calls(list(range(request.num_sequences)), 100)


def checked(kind: type, value):
    """As the routes do it."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors()) from error


def test_features_that_are_switched_off_may_be_named(chat, complete):
    off = {name: value for name, values in requests.NEUTRAL.items() for value in values}
    text = chat().choices[0].message.content
    assert chat(extra_body=off).choices[0].message.content == text
    assert chat(extra_body=dict.fromkeys([*off, "audio", "seed", "stop", "logit_bias", "top_p"])).choices
    assert chat(user="me", metadata={"a": "b"}, store=True, service_tier="flex").choices[0].message.content == text
    assert complete(suffix="", best_of=2, n=2, extra_body={"min_tokens": 0, "use_beam_search": False}).choices
    assert chat(extra_body={"tool_choice": "none", "parallel_tool_calls": False, "stream_reasoning": False}).choices


def test_the_table_of_fields_is_whole():
    """Every field that the openai package can send is honoured, ignored or refused; the chapter's table says which."""
    chat_fields = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    text_fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    honoured = set(requests.ChatRequest.model_fields), set(requests.CompletionRequest.model_fields)
    rest = requests.IGNORED | requests.NEUTRAL.keys()
    assert chat_fields - honoured[0] - rest == set()
    assert text_fields - honoured[1] - rest == set()
    assert not (honoured[0] | honoured[1]) & rest
    chapter = (Path(load.__file__).parent / "DEEPER.md").read_text()
    table = re.search(r"^\| Field \|.*\n\|---.*\n((?:\|.*\n)+)", chapter, flags=re.M)[1]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    told = {kind: {n for row in rows if row[1].startswith(kind) for n in re.findall(r"`(\w+)`", row[0])} for kind in
            ("honoured", "without effect", "refused")}  # fmt: skip
    assert told["honoured"] == (honoured[0] | honoured[1]) - {"best_of"}
    assert told["without effect"] == requests.IGNORED
    assert told["refused"] == requests.NEUTRAL.keys() | {"best_of"}


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v2/models", 404), ("GET", "/redoc", 404), ("GET", CHAT, 405), ("PUT", "/health", 405),
])  # fmt: skip
def test_wrong_addresses(server, method, path, status):
    request = urllib.request.Request(server.url + path, method=method)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == status
    assert json.load(error.value)["error"]["message"]


def test_an_unknown_model(chat):
    with pytest.raises(openai.NotFoundError) as error:
        chat(model="gpt-5")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_only_json(server, model):
    body = json.dumps({"model": model, "messages": HELLO, "max_tokens": 1}).encode()
    assert post(server.url, CHAT, body, **{"Content-Type": "text/plain"})[0] == 415
    assert post(server.url, CHAT, body, **{"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200


def test_a_body_that_is_too_large(server, model):
    for size in (MAX_BODY + 1, 4 * MAX_BODY):
        status, _, answer = post(server.url, TEXT, b" " * size)
        assert (status, list(answer)) == (413, ["error"])
    assert post(server.url, TEXT, {"model": model, "prompt": "x" * 90_000})[0] == 400  # the model has a limit too


def test_too_many_at_once(server, model, complete):
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(complete, n=16, max_tokens=80, extra_body={"ignore_eos": True}) for _ in range(3)]
        while local_server.metrics(server.url)["sglang:sequences_in_flight"] < 48:
            time.sleep(0.005)
        status, headers, answer = post(server.url, TEXT, {"model": model, "prompt": "x"})
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert all(len(future.result().choices) == 16 for future in busy)
    assert complete().choices


def test_many_streams_at_once_are_what_they_are_alone(server, model, complete):
    prompts = [f"{'shared start, ' * (i % 3)}number {i}" for i in range(12)]
    alone = [complete(prompt, max_tokens=12).choices[0].text for prompt in prompts]
    bodies = [{"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12} for prompt in prompts * 4]
    replies = asyncio.run(load.offer(load.Server(server.url), TEXT, bodies))
    assert [reply.error for reply in replies] == [None] * 48
    assert [reply.text for reply in replies] == alone * 4
    wait_until_idle(server.url)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def http_request(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(), len(content), content,
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["head", "body", "sent", "first token", "some tokens", "not streamed", "several"])
def test_a_client_that_leaves(server, model, phase):
    tokens = local_server.metrics(server.url)["sglang:generation_tokens_total"]
    body = {"model": model, "prompt": "hello", "max_tokens": 250, "ignore_eos": True, "stream": phase != "not streamed"}
    if phase == "several":
        body |= {"n": 4, "prompt": ["one", "two", "three"]}
    request = http_request(TEXT, body)
    with connect(server.url) as sock:
        sock.sendall(request[: {"head": 30, "body": len(request) - 20}.get(phase, len(request))])
        if phase in ("first token", "some tokens", "several"):
            received = b""
            while received.count(b"data: ") < (1 if phase == "first token" else 20):
                received += sock.recv(65536) or pytest.fail(received.decode())
        elif phase == "not streamed":
            while local_server.metrics(server.url)["sglang:sequences_in_flight"] == 0:
                time.sleep(0.005)
    found = wait_until_idle(server.url)
    assert found["sglang:generation_tokens_total"] - tokens < 240 * (12 if phase == "several" else 1)


def test_health_and_metrics(server, model, chat):
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        assert (answer.status, json.load(answer)) == (200, {"status": "ok"})
    before = wait_until_idle(server.url)
    answer = chat(max_tokens=5, extra_body={"ignore_eos": True})
    list(chat(max_tokens=5, stream=True, extra_body={"ignore_eos": True}))
    after = wait_until_idle(server.url)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["sglang:prompt_tokens_total"] == 2 * answer.usage.prompt_tokens
    assert gained["sglang:generation_tokens_total"] == 10
    assert gained["sglang:time_to_first_token_seconds_count"] == 2
    assert gained["sglang:inter_token_latency_seconds_count"] == 8
    assert 0 < gained["sglang:time_to_first_token_seconds_sum"] < 60
    assert gained["sglang:cached_tokens_total"] > 0
    assert gained["sglang:steps_total"] >= 10
    assert 0 < after["sglang:cache_hit_rate"] < 1
    assert 0 <= after["sglang:token_usage"] <= 1
    assert (post(server.url, CHAT, {})[0], post(server.url, "/nowhere", {})[0]) == (400, 404)
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        text = page.read().decode()
    assert 'sglang:http_requests_total{endpoint="/v1/chat/completions",status="400"}' in text
    assert 'endpoint="other",status="404"' in text


def test_all_processes_are_printed_before_the_address(server):
    served = next(i for i, line in enumerate(server.lines) if " is served at " in line)
    ready = {line.split()[0] for line in server.lines[:served] if " is ready (process " in line}
    assert ready == {"tokenizer-0", "scheduler", "detokenizer"}


def test_the_milestone_of_a_client_that_leaves(server, api, model):
    rows = run.disconnect(api, model, server.url)
    assert rows[0][1:2] == [1] and rows[1][1] == 0
    assert all(f"sglang:{name}" in local_server.metrics(server.url) for name in run.SHOWN)


def test_the_chat_in_the_terminal(server, monkeypatch, capsys):
    lines = iter(["hello", "/help", "and?", "/reset", "hello", "", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    asked = []
    create = openai.resources.chat.Completions.create

    def spy(self, **fields):
        asked.append(list(fields["messages"]))
        return create(self, **fields)

    monkeypatch.setattr(openai.resources.chat.Completions, "create", spy)
    words = f"client chat --url {server.url} --system brief --max-tokens 6 --temperature 0".split()
    monkeypatch.setattr("sys.argv", words)
    client.main()
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert asked[1][2]["content"] in capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    "--scale 0.08 --dataset offline --requests 6 --concurrency 2",
    "--scale 0.08 --dataset shared_prefix --requests 6 --rate 50 --ttft-limit 60000 --itl-limit 60000",
    "--scale 0.03 --dataset multi_turn --requests 2",
])  # fmt: skip
def test_the_benchmark_client(server, monkeypatch, capsys, tmp_path, flags):
    monkeypatch.setattr(client, "__file__", str(tmp_path / "client.py"))
    words = f"client bench --url {server.url} --save --api-key secret {flags}"
    monkeypatch.setattr("sys.argv", words.split())
    client.main()
    (record,) = (tmp_path / "results").glob("*.json")
    assert "secret" not in record.read_text()
    summary = json.loads(record.read_text())["summary"]
    assert (summary["requests"], summary["failed"]) == (8 if "turn" in flags else 6, 0)
    assert summary["good requests/s"] == summary["requests/s"] > 0
    assert summary["output tokens"] > 8
    assert (summary["of them cached"] > 0) == ("offline" not in flags)
    assert list((tmp_path / "results").glob("*.png"))


# --- a hub of our own -------------------------------------------------------------------------------------------


class FakeHub:
    """Hands out what a test puts into `script`: pieces for the call's first uid, an exception, or a number of seconds."""

    def __init__(self, *script):
        self.script, self.left_early, self.calls = script, 0, []
        self.info = {"max_len": 100, "vocab_size": 50, "model": "/path", "engine": {}, "tool_format": "hermes"}
        self.stats, self.reason, self.last = None, None, 0

    def new_uids(self, n):
        self.last += n
        return list(range(self.last - n, self.last))

    def health(self):
        return self.reason

    async def stream(self, calls):
        self.calls += calls
        self.left_early += 1
        for item in self.script:
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, Exception):
                raise item
            else:
                yield merged([Piece(calls[0].uids[0], *piece) for piece in item])
        self.left_early -= 1

    async def submit(self, message, answers, generates):
        """To a tokenizer that knows nothing."""
        uid = message.uids[0]
        answers.put_nowait(Detokenized(uid, "") if isinstance(message, Detokenize) else Tokenized(uid, []))

    def abort(self, uids):
        pass


def piece(text: str, tokens: int = 1, reason: str | None = None, logprobs=()) -> tuple:
    return text, [7] * tokens, reason, 5, 2, list(logprobs)


class Exchange:
    """One request to an app, without a network. The client leaves after `leave` messages, or reads them after `slow` seconds."""

    def __init__(self, path, body, *, headers=(), leave=None, slow=0.0, method="POST", kind=b"application/json"):
        self.parts = (
            [body] if isinstance(body, bytes) else [json.dumps(body).encode()] if isinstance(body, dict) else body
        )
        given = [(b"content-type", kind), *headers]
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": given, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        self.leave, self.slow, self.sent, self.bodies = leave, slow, 0, []
        self.status, self.headers = None, {}

    async def __call__(self, app):
        self.gone, parts = asyncio.Event(), list(self.parts)
        if self.leave == 0:
            self.gone.set()

        async def receive():
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])
            else:
                self.bodies.append(message.get("body", b""))
            self.sent += 1
            if self.leave is not None and self.sent >= self.leave:
                self.gone.set()
            await asyncio.sleep(self.slow)

        with contextlib.suppress(ZeroDivisionError):  # a test's stand-in for a mistake
            await app(self.scope, receive, send)
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


def app_of(hub: FakeHub, **fields):
    return create_app(hub, ["m"], Guard(Limits(**fields)))


def exchange(hub: FakeHub, body: dict | bytes | list, path: str = TEXT, *, settings=None, **options) -> Exchange:
    if isinstance(body, dict):
        body = {"model": "m", "prompt": "x"} | body
    return asyncio.run(Exchange(path, body, **options)(app_of(hub, **settings or {})))


def chunks_of(found: Exchange) -> list:
    return [data if data == "[DONE]" else json.loads(data) for data in events(found.body)]


def test_tokens_that_arrive_together_are_one_event():
    hub = FakeHub([piece("a"), piece(""), piece("b")], [piece("c"), piece("d", reason="stop")])
    *chunks, done = chunks_of(exchange(hub, {"stream": True}))
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("ab", None), ("cd", None), ("", "stop"),
    ]  # fmt: skip
    assert done == "[DONE]"
    assert hub.left_early == 0


def test_a_token_without_text_is_no_event():
    hub = FakeHub([piece("")], [piece("")], [piece("\u00e9")], [piece("", reason="length")])
    found = exchange(hub, {"stream": True, "stream_options": {"include_usage": True}})
    texts = [chunk["choices"][0]["text"] for chunk in chunks_of(found)[:-2]]
    assert texts == ["\u00e9", ""]
    assert chunks_of(found)[-2]["usage"]["completion_tokens"] == 4


def test_an_answer_that_is_complete_at_once():
    hub = FakeHub([piece("all", reason="stop")])
    assert chunks_of(exchange(hub, {"stream": True}))[-1] == "[DONE]"
    assert json.loads(exchange(hub, {}).body)["choices"][0]["text"] == "all"


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_failure_before_the_first_token_is_a_status(status):
    for body in ({"stream": True}, {}):
        hub = FakeHub(RequestFailed(status, "it did not work"))
        found = exchange(hub, body)
        assert (found.status, found.error["message"]) == (status, "it did not work")
        assert (b"retry-after" in found.headers) == (status == 503)


def test_a_failure_in_the_middle_is_an_event_and_no_end():
    hub = FakeHub([piece("a")], 0.01, RequestFailed(503, "the scheduler died"))
    found = exchange(hub, {"stream": True})
    first, last = chunks_of(found)
    assert first["choices"][0]["text"] == "a"
    assert last["error"] == {"message": "the scheduler died", "type": "server_error", "param": None, "code": None}
    assert exchange(FakeHub(*hub.script), {}).status == 503  # not streamed: nothing has gone out yet


@pytest.mark.parametrize("leave", [0, 1, 2, 3])
def test_who_leaves_a_stream_has_it_aborted(leave):
    hub = FakeHub([piece("a")], [piece("b")], 30.0, [piece("c", reason="stop")])
    found = exchange(hub, {"stream": True}, leave=leave)
    assert hub.left_early == 1
    assert b"[DONE]" not in found.body


def test_who_leaves_before_a_whole_answer_has_it_aborted():
    hub, body = FakeHub(30.0, [piece("c", reason="stop")]), {}
    start = time.monotonic()
    assert exchange(hub, body, leave=0).status == 499
    assert hub.left_early == 1
    assert exchange(FakeHub(30.0), {"stream": True}, leave=0).status == 499
    assert time.monotonic() - start < 20


def test_who_leaves_while_a_slow_reader_is_written_to():
    """The server hangs in `send`; the client's end must reach it there."""
    hub = FakeHub([piece("a")], [piece("b")], [piece("c", reason="stop")])
    start = time.monotonic()
    exchange(hub, {"stream": True}, leave=2, slow=2.0)
    assert time.monotonic() - start < 3.9
    assert hub.left_early == 1


def test_a_slow_reader_delays_nobody():
    hub = FakeHub(*([piece("a")] for _ in range(20)), [piece("b", reason="stop")])

    async def both():
        app = app_of(hub)
        slow = asyncio.ensure_future(Exchange(TEXT, {"model": "m", "prompt": "x", "stream": True}, slow=0.05)(app))
        await asyncio.sleep(0.01)
        quick = await Exchange(TEXT, {"model": "m", "prompt": "x", "stream": True})(app)
        assert not slow.done()
        return quick, await slow

    quick, slow = asyncio.run(both())
    assert len(chunks_of(quick)) == len(chunks_of(slow)) == 23


def test_what_the_hub_is_asked():
    hub = FakeHub([piece("a", reason="stop")])
    fields = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": -3, "stop": "end",
        "stop_token_ids": [3], "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.5,
        "logit_bias": {"5": -2}, "logprobs": 1, "ignore_eos": True, "cache_salt": "s",
    }  # fmt: skip
    exchange(hub, fields)
    (call,) = hub.calls
    assert (call.text, call.options, call.max_tokens, len(call.uids)) == (
        "x",
        TextOptions(["end"], continues=True),
        7,
        1,
    )
    assert call.max_len == 100
    expected = fields | {"stop_token_ids": {3}, "logit_bias": {5: -2}}
    for name in fields.keys() - {"max_tokens", "stop"}:
        assert getattr(call.params, name) == expected[name], name
    body = {"model": "m", "messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 4}
    hub = FakeHub()
    asyncio.run(Exchange(CHAT, body)(app_of(hub)))
    (call,) = hub.calls
    assert (call.messages, call.text, call.token_ids) == (HELLO, None, None)
    assert (call.max_tokens, call.params.logprobs, call.params.temperature, len(call.uids)) == (None, 4, 1, 2)


def test_the_key():
    settings, ok = {"api_key": "s\u00e9same"}, [piece("a", reason="stop")]
    good = ("authorization", "Bearer s\u00e9same")
    for header in (
        None,
        ("authorization", "Bearer x"),
        ("authorization", "s\u00e9same"),
        ("authorization", "Bearer s\u00e9same "),
    ):
        headers = [tuple(word.encode() for word in header)] if header else []
        found = exchange(FakeHub(ok), {}, settings=settings, headers=headers)
        assert (found.status, found.error["code"]) == (401, "invalid_api_key")
    assert exchange(FakeHub(ok), {}, settings=settings, headers=[tuple(word.encode() for word in good)]).status == 200
    for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/nowhere", 401)):
        assert exchange(FakeHub(), b"", path, method="GET", settings=settings).status == status


def test_a_body_is_counted_as_it_comes():
    hub = FakeHub([piece("a", reason="stop")])
    parts = [b'{"model": "m", ', b'"prompt": ', b'"x"}']
    assert exchange(hub, parts, settings={"max_body_bytes": len(b"".join(parts))}).status == 200
    for limit in (len(b"".join(parts)) - 1, 5):
        found = exchange(hub, parts, settings={"max_body_bytes": limit})
        assert (found.status, len(hub.calls)) == (413, 1)


def test_health_follows_the_hub():
    hub = FakeHub()
    assert exchange(hub, b"", "/health", method="GET").status == 200
    hub.reason = "the scheduler is being restarted"
    found = exchange(hub, b"", "/health", method="GET")
    assert (found.status, found.error["message"]) == (503, hub.reason)
    assert found.headers[b"retry-after"]


def test_a_mistake_of_ours_is_a_500_that_tells_nothing():
    found = exchange(FakeHub(ZeroDivisionError("secret")), {})
    assert found.status == 500
    assert b"secret" not in found.body and found.error["type"] == "server_error"


def test_every_answer_is_counted_under_its_route():
    """Also what nobody had foreseen, and paths with a name in them."""
    app = app_of(FakeHub(ZeroDivisionError("secret")))

    async def ask():
        await Exchange(TEXT, {"model": "m", "prompt": "x"})(app)
        for path in ("/v1/models/m", "/v1/models/n", "/nowhere"):
            await Exchange(path, b"", method="GET")(app)
        return await Exchange("/metrics", b"", method="GET")(app)

    page = asyncio.run(ask()).body.decode()
    for route, status in (
        (TEXT, 500),
        ("/v1/models/{model:path}", 200),
        ("/v1/models/{model:path}", 404),
        ("other", 404),
    ):
        assert f'sglang:http_requests_total{{endpoint="{route}",status="{status}"}} 1.0' in page


def test_tokens_that_come_together_share_the_time():
    metrics = Metrics("m", lambda: None)
    watch = Watch(metrics, "id", [7, 8], 1)
    watch.count([Piece(7, "aa", [1, 1], None, 5, 0), Piece(8, "", [], None, 5, 0)])
    assert (sum(metrics.ttft.counts), metrics.itl.counts[0]) == (1, 1)
    watch.told_at[7] -= 0.3  # seconds since the last one
    watch.count([Piece(7, "b" * 30, [1] * 30, None, 5, 0)])
    assert metrics.output_tokens == 32 and sum(metrics.ttft.counts) == 1
    assert sum(metrics.itl.counts) == 31 and metrics.itl.counts[ITL_BUCKETS.index(0.02)] == 30
    assert 8 not in watch.told_at


@pytest.mark.parametrize(("host", "settings", "status"), [
    (b"localhost:8000", {}, 200), (b"127.0.0.1", {}, 200), (b"[::1]:8000", {}, 200), (b"LOCALHOST", {}, 200),
    (b"evil.example:8000", {}, 403), (b"", {}, 403), (b"[::1", {}, 403), (b"\xff", {}, 403),
    (b"evil.example", {"hosts": ()}, 200),  # it listens to the network, where it has names that it does not know
    (b"evil.example", {"api_key": "k"}, 200),  # whoever has the key is no stranger
])  # fmt: skip
def test_a_page_that_calls_itself_127_0_0_1_gets_no_answer(host, settings, status):
    headers = [(b"host", host), (b"authorization", b"Bearer k")]
    settings = {"hosts": LOOPBACK} | settings
    found = exchange(FakeHub([piece("a", reason="stop")]), {}, headers=headers, settings=settings)
    assert found.status == status
    assert exchange(FakeHub(), b"", "/health", method="GET", headers=headers, settings=settings).status == 200


def test_a_call_that_never_fits_is_not_to_come_again():
    found = exchange(FakeHub(), {"n": 4}, settings={"max_concurrent": 3})
    assert (found.status, found.headers.get(b"retry-after")) == (400, None)
    assert "4 sequences" in found.error["message"]


def test_a_wrong_method_is_told_the_right_one():
    assert exchange(FakeHub(), b"", CHAT, method="GET").error["message"] == "Method Not Allowed: use POST"


def test_metrics_before_and_after_the_scheduler_has_spoken():
    hub = FakeHub()
    page = exchange(hub, b"", "/metrics", method="GET").body.decode()
    assert "sglang:steps" not in page and "sglang:http_requests" in page
    hub.stats = EngineStats(1, 2, 0.5, 30, 60, 7, 8, 9, 10, 11, 22)
    page = exchange(hub, b"", "/metrics", method="GET").body.decode()
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
    values = {s.name: s.value for s in samples if s.labels == {"model_name": "m"}}
    expected = {
        "num_running_reqs": 1, "num_queue_reqs": 2, "token_usage": 0.5, "pages_free": 30, "pages": 60, "steps_total": 7,
        "computed_tokens_total": 8, "num_retracted_requests_total": 10, "cache_hit_rate": 0.5,
    }  # fmt: skip
    assert {name: values[f"sglang:{name}"] for name in expected} == expected


def test_two_apps_share_nothing():
    hub = FakeHub([piece("a", reason="stop")])

    async def three():
        one, two = app_of(hub), app_of(hub)
        await Exchange(TEXT, {"model": "m", "prompt": "x"})(one)
        return [(await Exchange("/metrics", b"", method="GET")(app)).body.decode() for app in (one, two)]

    one, two = asyncio.run(three())
    assert 'sglang:generation_tokens_total{model_name="m"} 1.0' in one
    assert 'sglang:generation_tokens_total{model_name="m"} 0.0' in two


def test_the_routes_are_those_of_the_chapter():
    chapter = (Path(load.__file__).parent / "DEEPER.md").read_text()
    paths = app_of(FakeHub()).openapi()["paths"]
    assert [path for path in paths if "{" not in path and f"`{path}`" not in chapter] == []


# --- the load generator -----------------------------------------------------------------------------------------


def test_text_offsets_of_split_and_broken_characters():
    choice = answers.Choice(0)
    data = [b"a", b"\xf0\x9f", b"\x98\x80", b"b", b"\xff", b"c", b"\xe4\xbd\xa0x"]
    tokens = [TokenLogprob("", 0.0, piece) for piece in data]
    assert [choice.offset(token) for token in tokens] == [0, 1, 1, 2, 3, 4, 5]
    assert [answers.token_name(TokenLogprob(d.decode(errors="replace"), 0.0, d)) for d in data[:3]] == [
        "a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80",
    ]  # fmt: skip
    special = TokenLogprob("</s>", 0.0, b"</s>", shown=False)
    assert [choice.offset(token) for token in (special, tokens[0], tokens[0])] == [7, 7, 8]


def serve_bytes(*answers: list[bytes]):
    """A server that sends prepared bytes, each part in a packet of its own. Returns its URL."""
    sock = socket.create_server(("127.0.0.1", 0))

    def run():
        for parts in answers:
            connection, _ = sock.accept()
            with connection:
                connection.recv(65536)
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.03)
        sock.close()

    threading.Thread(target=run, daemon=True).start()
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


def chunked(*parts: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]


def test_the_load_generator_reads_what_servers_send():
    def event(text: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": None}]}).encode() + b"\n\n"

    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    done, head = b"data: [DONE]\n\n", b"HTTP/1.1 200 OK\r\n"
    encoded = head + b"Transfer-Encoding: chunked\r\n\r\n"
    whole = event("one\u00e9") + event("two")
    error = b'data: {"error": {"message": "died"}}\n\n'
    url = serve_bytes(
        [encoded, *chunked(event("one\u00e9"), event("two")[:9], event("two")[9:], usage + done), b"0\r\n\r\n"],
        [head + b"\r\n" + whole[:30], whole[30:] + usage, done],
        [encoded, *chunked(event("one"))],
        [encoded, *chunked(event("one"), error), b"0\r\n\r\n"],
        [b"HTTP/1.1 429 Too Many Requests\r\n\r\n", b'{"error": 1}'],
        [],
    )
    replies = asyncio.run(load.offer(load.Server(url), TEXT, [{}] * 6, concurrency=1))
    for reply in replies[:2]:
        assert (reply.error, reply.text, reply.prompt_tokens, reply.output_tokens) == (None, "one\u00e9two", 3, 2)
        assert len(reply.arrivals) == 2
    assert replies[0].gaps[0] > 0.05  # three packets
    assert replies[0].e2e > replies[0].ttft > 0.02
    assert [bool(reply.error) for reply in replies[2:]] == [True] * 4
    assert "broke off" in replies[2].error and replies[3].error == "died" and "429" in replies[4].error
    summary = load.summarize(replies, ttft_limit=60, itl_limit=1e-9)
    assert (summary.requests, summary.failed, summary.good, summary.output_tokens) == (6, 4, 1, 4)  # one came at once
    assert load.summarize(replies, ttft_limit=60, itl_limit=60).good == 2


def test_nobody_is_there():
    (reply,) = asyncio.run(load.offer(load.Server("http://127.0.0.1:9"), TEXT, [{}]))
    assert reply.error
    assert load.summarize([reply]).rows == []


def test_jobs_keep_to_the_limit_and_to_the_rate():
    running, most = 0, 0

    async def job():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return time.monotonic()

    assert len(asyncio.run(load.spread([job] * 10, concurrency=3))) == 10
    assert most == 3
    times = asyncio.run(load.spread([job] * 10, rate=50.0))
    assert times == sorted(times) and times[-1] - times[0] > 0.05


# --- what a text must be, and tools ---------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}}}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("fields", "whole"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, None),
    ({"extra_body": {"json_schema": json.dumps(SCHEMA)}}, None),
    ({"extra_body": {"guided_json": SCHEMA}}, None),
    ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, None),
    ({"extra_body": {"regex": "[ab]{2}-[0-9]"}}, "[ab]{2}-[0-9]"),
    ({"extra_body": {"guided_regex": "x(yz)?"}}, "x(yz)?"),
    ({"extra_body": {"guided_choice": ["left", "right"]}}, "left|right"),
    ({"extra_body": {"structured_outputs": {"choice": ["ja", "nein"]}}}, "ja|nein"),
    ({"extra_body": {"ebnf": 'root ::= "<" [ab] ">"'}}, "<[ab]>"),
    ({"extra_body": {"guided_grammar": 'root ::= "q" "r"?'}}, "qr?"),
])  # fmt: skip
def test_the_text_is_what_it_must_be(chat, fields, whole):
    answer = chat(**{"max_tokens": 100, "temperature": 1, "n": 2, "logprobs": True} | fields)
    for choice in answer.choices:
        text = choice.message.content
        assert choice.finish_reason == "stop" and (re.fullmatch(whole, text) if whole else json.loads(text))
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(**{"max_tokens": 100, "stream": True} | fields)
    )
    assert re.fullmatch(whole, streamed) if whole else type(json.loads(streamed)["ok"]) is bool


def test_max_tokens_inside_json_is_length(chat):
    answer = chat(response_format={"type": "json_object"}, max_tokens=3)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content.startswith("{")


def test_a_stop_string_inside_what_must_be(chat):
    """Both count: the text is right as far as it goes."""
    answer = chat(extra_body={"regex": "[ab]{4}-[0-9]+x"}, stop=["-"])
    assert re.fullmatch("[ab]{4}", answer.choices[0].message.content) and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_calls_of_tools(chat, choice):
    ask = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80, "temperature": 1, "parallel_tool_calls": False}
    whole = chat(**ask).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments)["n"] in (1, 22)
    chunks = [chunk.choices[0] for chunk in chat(stream=True, **ask)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert deltas[0].function.name == "f" and deltas[0].id and not any(d.id or d.function.name for d in deltas[1:])
    assert json.loads("".join(delta.function.arguments for delta in deltas))["n"] in (1, 22)
    assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)


def test_tools_are_told_and_their_results_too(chat):
    alone = chat().usage.prompt_tokens
    assert chat(tools=[TOOL]).usage.prompt_tokens > alone + 150
    assert chat(tools=[TOOL], tool_choice="none").usage.prompt_tokens == alone
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    past = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_call_id": "c"}]
    assert chat(messages=past).usage.prompt_tokens > alone + 60
