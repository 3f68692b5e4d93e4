"""From tokens to text: stop strings are found wherever they lie and never shown, no character is halved, and nothing of
a text is lost or said twice.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.tokenizer import load_tokenizer
from stage9_server.byte_tokenizer import ByteTokenizer
from stage9_server.detokenizer_worker import Detokenizing
from stage9_server.ipc import API, SCHEDULER
from stage9_server.messages import Abort, Failed, Piece, Pieces, Started, Stopped, TextOptions, Token, Tokens
from stage9_server.text import StopStrings, TextStream

END = 1  # the end token of text_checkpoint; byte b is token_of(b)


@pytest.fixture(scope="module")
def tokenizer(text_checkpoint):
    return load_tokenizer(str(text_checkpoint.path))


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """What is shown of a whole text: read letter by letter, up to where the first stop string to be complete began."""
    for end in range(len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))], True
    return text, False


def chunks(text: str, sizes: list[int]) -> list[str]:
    result = []
    for size in sizes:
        result.append(text[:size])
        text = text[size:]
    return [*result, text]


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
@example(text="aabaab", stop=["abaab", "b"], sizes=[6])  # the earlier end wins, not the earlier beginning
@example(text="aab", stop=["ab", "aab"], sizes=[1, 1])  # of two that end together, the longer one
@example(text="aaab", stop=["aab"], sizes=[1, 1, 1])  # a beginning within a beginning
def test_stop_strings(text, stop, sizes):
    matcher, shown, stopped = StopStrings(stop), "", False
    expected = cut(text, stop)
    for chunk in chunks(text, sizes):
        piece, stopped = matcher.push(chunk)
        shown += piece
        assert expected[0].startswith(shown)  # nothing has to be taken back
        if stopped:
            break
    assert (shown if stopped else shown + matcher.held, stopped) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stop):
    matcher = StopStrings(stop)
    shown, stopped = matcher.push(text)
    if not stopped:
        beginnings = [s[:n] for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
        assert matcher.held == max(beginnings, key=len, default="")
        assert shown + matcher.held == text


def ids_of(tokenizer, data: bytes) -> list[int]:
    """One token a byte, whatever the bytes are."""
    table = {tokenizer.token_bytes(i): i for i in range(2, 258)}
    return [table[bytes([byte])] for byte in data]


@settings(max_examples=200, deadline=None)
@given(data=st.one_of(st.binary(max_size=40), st.text(max_size=15).map(lambda text: text.encode("utf-8", "ignore"))))
@example(data="🙂 中文 e\u0301 \ufffd".encode())
@example(data=b"\xf0\x9f\x99")
@example(data=b"\xe4\xb8" * 30)
def test_any_bytes_as_tokens(tokenizer, data):
    ids = ids_of(tokenizer, data)
    stream = TextStream(tokenizer, TextOptions([]), [])
    shown = "".join(stream.push(i)[0] for i in ids) + stream.flush()[0]
    assert shown == tokenizer.decode(ids) == data.decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(text=st.text("a🙂é", max_size=12), stop=st.lists(st.text("a🙂é", min_size=1, max_size=3), max_size=2))
def test_stop_strings_across_tokens_that_are_parts_of_characters(tokenizer, text, stop):
    stream, shown, stopped = TextStream(tokenizer, TextOptions(stop), []), "", False
    for token in ids_of(tokenizer, text.encode()):
        piece, stopped = stream.push(token)
        shown += piece
        if stopped:
            break
    if not stopped:
        rest, stopped = stream.flush()
        shown += rest
    assert (shown, stopped) == cut(text, stop)


def test_the_tail_can_complete_a_stop_string(tokenizer):
    stream = TextStream(tokenizer, TextOptions(["a\ufffd"]), [])
    assert [stream.push(i) for i in ids_of(tokenizer, b"a\xf0")] == [("", False)] * 2
    assert stream.flush() == ("", True)


def test_the_prompt_is_echoed_and_not_searched(tokenizer):
    stream = TextStream(
        tokenizer, TextOptions(["ab"]), [0, *ids_of(tokenizer, "xab 🙂".encode()), *ids_of(tokenizer, b"\xc3")]
    )
    assert stream.echo == "xab 🙂"  # without the special token, and without half a character
    assert stream.push(*ids_of(tokenizer, b"\xa9")) == ("é", False)


# --- the worker's bookkeeping ---


def token(uid: int, id: int, reason: str | None = None, **more) -> Token:
    return Token(uid, id, reason, 0, **more)


def begun(uid: int, prompt_tokens: int, stop: list[str], **options) -> Tokens:
    """What comes with a sequence's first token."""
    return Tokens([], [Started(uid, prompt_tokens, TextOptions(stop, **options))])


def run(detokenizing: Detokenizing, *messages) -> list:
    return [answer for message in messages for answer in detokenizing.handle(message)]


def pieces(answers: list) -> list[Piece]:
    return [piece for to, answer in answers if isinstance(answer, Pieces) for piece in answer.pieces if to == API]


@pytest.mark.parametrize(("reason", "shown"), [("max_tokens", "length"), ("length", "length"), ("abort", "abort")])
def test_an_end_that_is_no_token_loses_nothing(tokenizer, reason, shown):
    a, half = ids_of(tokenizer, b"a\xf0")
    worker = Detokenizing(tokenizer)
    rest = pieces(run(worker, begun(7, 3, ["a\ufffdb"]), Tokens([token(7, a)]), Tokens([token(7, half, reason)])))
    assert rest == [Piece(7, "", [a], None, 3, 0), Piece(7, "a\ufffd", [half], shown, 3, 0)]
    assert worker.sequences == {}


@pytest.mark.parametrize("reason", ["eos", "stop_token"])
def test_a_token_that_ends_the_text_is_counted_but_not_shown(tokenizer, reason):
    a, b = ids_of(tokenizer, b"ab")
    answers = run(
        Detokenizing(tokenizer),
        begun(7, 3, ["ax"]),
        Tokens([token(7, a, logprob=-1.0)]),
        Tokens([token(7, b, reason, logprob=-1.0)]),
    )
    first, last = pieces(answers)
    assert (first.text, first.token_ids, len(first.logprobs)) == ("", [a], 1)
    assert (last.text, last.token_ids, last.finish_reason, last.logprobs) == ("a", [b], "stop", [])


def test_a_stop_string_ends_the_sequence_in_the_engine_too(tokenizer):
    x, a, b = ids_of(tokenizer, b"xab")
    worker = Detokenizing(tokenizer)
    answers = run(worker, begun(1, 3, ["ab"]), begun(2, 3, []))
    answers = run(worker, Tokens([token(1, x), token(2, x)]), Tokens([token(1, a), token(2, a)]))
    assert [p.text for p in pieces(answers)] == ["x", "x", "", "a"]
    answers = run(worker, Tokens([token(1, b), token(2, b)]))
    assert pieces(answers) == [Piece(1, "", [b], "stop", 3, 0), Piece(2, "b", [b], None, 3, 0)]
    assert (SCHEDULER, Stopped([1])) in answers
    assert pieces(run(worker, Tokens([token(1, x), token(2, x)]))) == [Piece(2, "x", [x], None, 3, 0)]  # a late one


def test_a_stop_string_in_the_last_token_needs_no_abort(tokenizer):
    (a,) = ids_of(tokenizer, b"a")
    answers = run(Detokenizing(tokenizer), begun(1, 3, ["a"]), Tokens([token(1, a, "max_tokens")]))
    assert pieces(answers) == [Piece(1, "", [a], "stop", 3, 0)]
    assert [to for to, _ in answers] == [API]


def test_one_message_for_all_that_a_step_sampled(tokenizer):
    a, *_ = ids_of(tokenizer, b"a")
    worker = Detokenizing(tokenizer)
    run(worker, *(begun(uid, 1, []) for uid in range(50)))
    assert len(run(worker, Tokens([token(uid, a) for uid in range(50)]))) == 1


def test_tokens_whose_beginning_is_lost_are_an_error(tokenizer):
    """So a client can't wait for ever, whatever a dead detokenizer took with it."""
    answers = run(Detokenizing(tokenizer), Tokens([token(9, 5)]))
    assert (SCHEDULER, Stopped([9])) in answers
    assert [answer.uids for to, answer in answers if isinstance(answer, Failed) and to == API] == [[9]]


def test_forgetting(tokenizer):
    worker = Detokenizing(tokenizer)
    assert run(worker, begun(1, 3, []), Abort([1, 2])) == []
    assert worker.sequences == {}


def test_logprobs_show_tokens_as_they_are(tokenizer):
    half, end = ids_of(tokenizer, b"\xf0")[0], END
    answers = run(
        Detokenizing(tokenizer),
        begun(1, 3, []),
        Tokens([token(1, half, logprob=-0.5, top_logprobs=[(half, -0.5), (end, -2.0)])]),
    )
    ((chosen, top),) = pieces(answers)[0].logprobs
    assert (chosen.text, chosen.logprob, chosen.data) == ("\ufffd", -0.5, b"\xf0")
    assert [(t.text, t.logprob, t.data) for t in top] == [("\ufffd", -0.5, b"\xf0"), ("</s>", -2.0, b"</s>")]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_stand_in_of_dummy_models(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer, TextOptions([]), [])
    assert "".join(stream.push(i)[0] for i in [*ids, 300]) == text + "<300>"
    assert text in tokenizer.decode(tokenizer.chat([{"role": "user", "content": text}]))
