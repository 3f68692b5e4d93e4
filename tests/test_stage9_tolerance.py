"""What real clients send besides: fields that change nothing, histories with tools and thoughts, ids of their own; and what the
server tells those who watch it.
"""

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import UserError
from common.tokenizer import load_tokenizer
from stage7_radix.params import RequestParams
from stage9_server import check_clients
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.cli import parse, translated
from stage9_server.guard.guard import Guard, Limits, NoGuard
from stage9_server.guard.texts import NoTextLimits
from stage9_server.messages import EngineStats, Failed, Generate, Piece, Tokenize
from stage9_server.observe.logs import throughput_lines
from stage9_server.observe.metrics import Metrics, Watch
from stage9_server.openai_api.app import create_app
from stage9_server.openai_api.reasoning import Thinking
from stage9_server.tokenizer_worker import Tokenizing
from tests.test_stage9_api import CHAT, HELLO, TEXT, Exchange, FakeHub, app_of, chunks_of, exchange, piece

DONE = [piece("a", reason="stop")]


def chat(hub: FakeHub, **fields) -> Exchange:
    return exchange(hub, json.dumps({"model": "m", "messages": HELLO} | fields).encode(), CHAT)


# --- fields -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {"min_tokens": 0, "best_of": 1, "use_beam_search": False, "parallel_tool_calls": True, "tool_choice": "auto"},
    {"parallel_tool_calls": False, "tool_choice": "none", "tools": []},
    {"skip_special_tokens": True, "no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True,
     "continue_final_message": False, "return_hidden_states": False},  # what sglang-router adds
    {"max_tokens": 3, "max_completion_tokens": 5}, {"guided_json": None, "lora_path": None},
])  # fmt: skip
def test_fields_that_ask_for_nothing(fields):
    hub = FakeHub(DONE)
    assert chat(hub, **fields).status == 200
    assert hub.calls[0].max_tokens == fields.get("max_completion_tokens")


@pytest.mark.parametrize("fields", [
    {"use_beam_search": True}, {"continue_final_message": True}, {"suffix": "a"}, {"bad_words": ["a"]}, {"chat_template": "a"},
    {"return_token_ids": 0},  # in JSON, 0 is not false
])  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused(fields):
    found = chat(FakeHub(), **fields)
    assert (found.status, found.error["code"], found.error["param"]) == (400, "unsupported_parameter", *fields)


def test_what_is_not_known_is_ignored_and_told_once_for_each_client(caplog):
    async def run():
        app = app_of(FakeHub(DONE))
        for body in ({"moood": 1}, {"moood": 2, "other\n": "secret text"}):
            body = {"model": "m", "prompt": "x", "stream_options": None} | body
            assert (await Exchange(TEXT, body)(app)).status == 200

    asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert told == [
        "ignored a field that is not known: 'moood', from 127.0.0.1",
        "ignored a field that is not known: 'other\\n', from 127.0.0.1",
    ]


def test_histories_with_tools_and_thoughts():
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}]
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "so?", "mood": "good"},
    ]
    hub = FakeHub(DONE)
    assert chat(hub, messages=history, chat_template_kwargs={"enable_thinking": False}).status == 200
    (call,) = hub.calls
    assert call.variables == {"enable_thinking": False}
    assert call.messages[1] == {
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
    }  # fmt: skip
    assert call.messages[2:] == [
        {"role": "tool", "content": "3", "tool_call_id": "c1"}, {"role": "user", "content": "so?"},
    ]  # fmt: skip


@pytest.fixture
def thinker(text_checkpoint):
    """A tokenizer whose template opens <think>, unless it is told not to."""
    tokenizer = load_tokenizer(str(text_checkpoint.path))
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.reasoning_content or '' }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
        "{% endfor %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
    )
    return Tokenizing(tokenizer, NoTextLimits())


def tokenize(tokenizing: Tokenizing, **fields) -> Generate | Failed:
    call = Tokenize([1], messages=HELLO, params=RequestParams(), max_len=500)
    for name, value in fields.items():
        setattr(call, name, value)
    return tokenizing.handle(call)[1]


def test_variables_of_a_template(thinker):
    assert tokenize(thinker).options.thinking is True
    off = tokenize(thinker, variables={"enable_thinking": False})
    assert off.options.thinking is False
    assert thinker.tokenizer.decode(off.prompt_ids).endswith("<think></think>")
    for name in ("tokenize", "chat_template", "conversation", "add_generation_prompt"):
        failed = tokenize(thinker, variables={name: "x"})
        assert (failed.status, f"{name} is no variable" in failed.message) == (400, True)
    assert tokenize(Tokenizing(ByteTokenizer(), NoTextLimits())).options.thinking is None


def test_variables_are_small():
    for wrong in ({"a": "x" * 2000}, {"a": {"b": 1}}, {str(i): 1 for i in range(40)}, {"k" * 100: 1}):
        assert chat(FakeHub(), chat_template_kwargs=wrong).status == 400


# --- thoughts ---------------------------------------------------------------------------------------------------


def split(text: str, inside: bool) -> tuple[str, str]:
    """(thought, content) of a whole text, in the simplest way."""
    if not inside:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.lstrip().removeprefix("<think>")
    thought, end, rest = text.partition("</think>")
    return thought, rest.lstrip() if end else ""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "\n", " ", "<"]), max_size=12).map(
        "".join
    ),
    st.lists(st.integers(1, 4), max_size=30),
    st.booleans(),
)
def test_thoughts_are_split_off_wherever_pieces_end(text, sizes, inside):
    parser, found, rest = Thinking(inside), {"reasoning_content": "", "content": ""}, text
    for size in sizes:
        for name, value in parser.push(rest[:size]).items():
            found[name] += value
        rest = rest[size:]
    for name, value in parser.push(rest, last=True).items():
        found[name] += value
    assert (found["reasoning_content"], found["content"]) == split(text, inside)


def thoughtful(*texts: str) -> FakeHub:
    def one(i: int, text: str) -> tuple:
        return text, [7], "stop" if i == len(texts) - 1 else None, 5, 2, [], True

    return FakeHub(*([one(i, text)] for i, text in enumerate(texts)))


def test_reasoning_content():
    texts = ("so", " it is</th", "ink>\n\nFo", "ur")
    message = json.loads(chat(thoughtful(*texts)).body)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Four", "refusal": None, "reasoning_content": "so it is"}
    plain = json.loads(chat(thoughtful(*texts), separate_reasoning=False).body)["choices"][0]["message"]
    assert plain["content"] == "".join(texts)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(chat(thoughtful(*texts), stream=True))[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four"
    none = json.loads(chat(FakeHub([piece("<think>x</think>y", reason="stop")])).body)["choices"][0]["message"]
    assert none["content"] == "<think>x</think>y"  # a template that knows no thoughts


# --- names and ids ----------------------------------------------------------------------------------------------


def app_with(hub: FakeHub, **fields):
    return create_app(hub, ["first", "second"], Guard(Limits()), **fields)


def test_a_model_may_have_several_names():
    async def run():
        app = app_with(FakeHub(DONE))
        for name, status in (("first", 200), ("second", 200), ("m", 404)):
            found = await Exchange(TEXT, {"model": name, "prompt": "x"})(app)
            assert found.status == status
            assert status == 404 or json.loads(found.body)["model"] == name
        cards = json.loads((await Exchange("/v1/models", b"", method="GET")(app)).body)["data"]
        assert [card["id"] for card in cards] == ["first", "second"]
        info = json.loads((await Exchange("/model_info", b"", method="GET")(app)).body)
        assert (info["served_model_name"], info["model_path"]) == ("first", "/path")

    asyncio.run(run())


@pytest.mark.parametrize(("given", "kept"), [
    (b"abc-1.2:3", True), (b"x" * 128, True), (b"x" * 129, False), (b"a b", False), (b"a\tb", False), (b"", False), (None, False),
])  # fmt: skip
def test_ids_of_requests(given, kept):
    headers = [] if given is None else [(b"x-request-id", given)]
    for body in ({}, {"stream": True}):
        found = exchange(FakeHub(DONE), body, headers=headers)
        request_id = found.headers[b"x-request-id"]
        assert (request_id == given) == kept and re.fullmatch(rb"[\w.:-]{1,128}", request_id)
        assert b'"id":"cmpl-' + request_id in found.body
    assert exchange(FakeHub(), {"n": 99}, headers=headers).headers[b"x-request-id"]  # errors have one too


def test_sglangs_own_way_of_asking():
    hub = FakeHub([piece("a"), piece("b", reason="length")])
    params = {"max_new_tokens": 2, "stop": ["x"], "no_stop_trim": True, "sampling_seed": 5, "temperature": 0}
    found = exchange(hub, json.dumps({"text": "hi", "sampling_params": params, "rid": "r"}).encode(), "/generate")
    (call,) = hub.calls
    assert (call.text, call.params.seed, call.params.max_tokens, call.options.include_stop) == ("hi", 5, 2, True)
    answer = json.loads(found.body)
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]) == (
        "ab",
        [7, 7],
        {"type": "length"},
    )
    for wrong in (
        {},
        {"text": "x", "input_ids": [1]},
        {"text": "x", "sampling_params": {"temperature": 9}},
        {"text": "x", "return_logprob": True},
    ):
        assert exchange(FakeHub(), json.dumps(wrong).encode(), "/generate").status == 400


def test_a_flushed_cache_is_not_found_again():
    async def run():
        hub = FakeHub(DONE)
        app = app_of(hub)
        for _ in range(2):
            await Exchange(TEXT, {"model": "m", "prompt": "x", "cache_salt": "s"})(app)
            flushed = await Exchange("/flush_cache", b"")(app)
            assert flushed.status == 200
        foreign = await Exchange("/flush_cache", b"", headers=[(b"origin", b"http://evil")], kind=b"text/plain")(app)
        assert foreign.status == 415
        assert len({call.params.cache_salt for call in hub.calls}) == 2

    asyncio.run(run())


# --- to watch it ------------------------------------------------------------------------------------------------


def test_a_line_per_request_and_no_text_in_it(caplog):
    caplog.set_level(logging.INFO, "stage9_server")
    headers = [(b"x-request-id", b"id-7")]
    exchange(FakeHub([piece("secret", 2)], [piece("secret", 3, reason="stop")]), {"prompt": "private"}, headers=headers)
    exchange(FakeHub([piece("secret")], 30.0), {"stream": True}, leave=2)
    first, second = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]
    assert re.fullmatch(
        r"request id-7: prompt 5, cached 2, output 5 tokens; first token \d\.\d{3} s, total \d\.\d{3} s; stop", first
    )
    assert second.endswith("; abort")
    assert "secret" not in caplog.text and "private" not in caplog.text


def test_lines_of_throughput_while_there_is_work(caplog):
    caplog.set_level(logging.INFO, "stage9_server")
    hub = FakeHub()
    hub.up = hub.names = {"scheduler"}

    async def run():
        task = asyncio.ensure_future(throughput_lines(hub, 0.02))
        await asyncio.sleep(0)
        for i in range(4):
            hub.stats = EngineStats(i % 2, 0, 0.5, 30, 60, 10 + i, 8, 100 * i, 0, 5, 10)
            await asyncio.sleep(0.03)
        lines = len(caplog.records)
        hub.stats = EngineStats(0, 0, 0.5, 30, 60, 13, 8, 300, 0, 5, 10)
        await asyncio.sleep(0.1)
        task.cancel()
        return lines

    lines = asyncio.run(run())
    assert lines >= 2 and len(caplog.records) <= lines + 2
    assert caplog.records[0].getMessage() == "ready after 0.0 s"
    assert "KV pool 50 % used" in caplog.text and "cache hits 50 %" in caplog.text


def test_metrics_of_a_call():
    hub = FakeHub([piece("a")], [piece("b", reason="stop")])

    async def run() -> str:
        app = app_of(hub)
        await Exchange(TEXT, {"model": "m", "prompt": "x"})(app)
        hub.script = ([piece("a")], 30.0)
        await Exchange(TEXT, {"model": "m", "prompt": "x", "stream": True}, leave=2)(app)
        return (await Exchange("/metrics", b"", method="GET")(app)).body.decode()

    page = asyncio.run(run())
    for line in (
        'sglang:num_requests_total{model_name="m"} 2.0', 'sglang:num_aborted_requests_total{model_name="m"} 1.0',
        'sglang:finish_reasons_total{model_name="m",reason="stop"} 1.0', 'sglang:prompt_tokens_total{model_name="m"} 10.0',
        'sglang:e2e_request_latency_seconds_count{model_name="m"} 1.0', 'sglang:generation_tokens_total{model_name="m"} 3.0',
    ):  # fmt: skip
        assert line in page, line
    metrics = Metrics("m", lambda: None)
    Watch(metrics, "id", [1], 1).count([Piece(1, "a", [7], None, 5, 0, queue_seconds=0.03)])
    assert sum(metrics.queue.counts) == 1


def test_a_page_for_people():
    found = exchange(FakeHub(), b"", "/", method="GET", settings={"api_key": "k"})
    assert (found.status, found.headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
    page = found.body.decode()
    for address in ("/docs", "/metrics", "/v1/chat/completions", "/inspector"):
        assert address in page
    assert (
        "innerHTML" not in page and "http://" not in page and "https://" not in page
    )  # no markup of answers, nothing from elsewhere


@pytest.mark.parametrize(("cors", "origin", "allowed"), [
    ((), "http://a", False), (("http://a",), "http://a", True), (("http://a",), "http://b", False), (("*",), "http://b", True),
])  # fmt: skip
def test_pages_of_other_origins(cors, origin, allowed):
    headers = [(b"origin", origin.encode()), (b"access-control-request-method", b"POST"),
               (b"access-control-request-headers", b"content-type,authorization")]  # fmt: skip

    async def run() -> Exchange:
        app = create_app(FakeHub(DONE), ["m"], Guard(Limits(api_key="k")), cors)
        return await Exchange(TEXT, b"", method="OPTIONS", headers=headers)(app)

    found = asyncio.run(run())
    assert (found.status == 200 and b"access-control-allow-origin" in found.headers) == allowed


def test_without_a_guard_nothing_is_asked_for():
    async def run() -> Exchange:
        app = create_app(FakeHub(DONE), ["m"], NoGuard())
        return await Exchange(TEXT, {"model": "m", "prompt": "x"}, headers=[(b"host", b"evil")])(app)

    assert asyncio.run(run()).status == 200


# --- clients ---


def test_the_table_of_clients_is_what_was_tried():
    folder = Path(check_clients.__file__).parent
    rows = json.loads((folder / "results" / "cpu-clients.json").read_text())["rows"]
    assert {(client, what) for client, _, what, _ in rows} == {
        (name, what) for name, client in check_clients.CLIENTS.items() for what in client.checks
    }
    assert {result for *_, result in rows} == {"works"}
    page = (folder / "DEEPER.md").read_text()
    for name in check_clients.CLIENTS:
        version, *_ = {version for client, version, *_ in rows if client == name}
        tried = "; ".join(what for client, _, what, _ in rows if client == name)
        assert f"| {name} | {version} | {tried} |" in page


# --- flags ------------------------------------------------------------------------------------------------------


def test_flags_of_others():
    words = "--model-path=dummy:tiny --tp-size 2 --max-num-seqs 7 --mem-fraction-static 0.5 --context-length 99 --enforce-eager"
    words += " --served-model-name a b --disable-radix-cache --page-size 4 --host ::1 --log-level info"
    args = parse("", words.split())
    expected = {
        "model": "dummy:tiny",
        "tp": 2,
        "max_running": 7,
        "memory_fraction": 0.5,
        "max_model_len": 99,
        "graph": False,
    }
    expected |= {"served_model_name": ["a", "b"], "radix": False, "page_size": 4, "host": "::1", "log_level": "info"}
    assert {name: getattr(args, name) for name in expected} == expected
    assert parse("", ["--model", "dummy:tiny"]).served_model_name == ["dummy:tiny"]
    for word, ours in (
        ("--schedule-policy=lpm", "--order"),
        ("--dp-size", "sglang-router"),
        ("--trust-remote-code", "never run"),
    ):
        with pytest.raises(UserError, match=ours):
            translated([word])
