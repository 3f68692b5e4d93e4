"""The lab, chapter 9: from tokens to a stream of text."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

from common.tokenizer import IncrementalDecoder
from stage9_server.hub import Hub, RequestFailed
from stage9_server.messages import Accepted, Failed, Piece
from stage9_server.text import StopStrings
from tests.lab.learner import expect


def pushed(stop: list[str], *pieces: str) -> tuple[list[str], bool]:
    """What is shown of each piece, up to a stop string; and was there one?"""
    strings, shown, stopped = StopStrings(stop), [], False
    for piece in pieces:
        text, stopped = strings.push(piece)
        shown.append(text)
        if stopped:
            break
    return shown, stopped


class Test_9_1:
    """StopStrings.push"""

    def test_a_text_without_a_stop_string_passes(self):
        expect("stop END: 'good', 'morning'", pushed(["END"], "good", "morning"), (["good", "morning"], False))

    def test_nothing_of_a_stop_string_is_shown(self):
        expect("stop END: 'a END b'", pushed(["END"], "a END b"), (["a "], True))

    def test_it_may_come_in_pieces(self):
        expect("stop END: 'aE', 'N', 'D'", pushed(["END"], "aE", "N", "D"), (["a", "", ""], True))

    def test_what_was_held_back_in_vain_is_shown(self):
        expect("stop END: 'aE', 'N', 'x'", pushed(["END"], "aE", "N", "x"), (["a", "", "ENx"], False))

    def test_a_beginning_within_a_beginning(self):
        expect("stop aab: 'a', 'a', 'a', 'b'", pushed(["aab"], "a", "a", "a", "b"), (["", "", "a", ""], True))

    def test_the_first_to_be_complete_counts_the_longer_one_of_two(self):
        expect("stop abaab and b: 'aabaab'", pushed(["abaab", "b"], "aabaab"), (["aa"], True))
        expect("stop ab and aab: 'aab'", pushed(["ab", "aab"], "aab"), ([""], True))


class Bytes:
    """A tokenizer: 1 is "Hi", 2 and 3 are the halves of "é", 4 is " you", 9 is a special token; a text begins without a space."""

    table = {1: b"Hi", 2: b"\xc3", 3: b"\xa9", 4: b" you", 9: b""}  # noqa: RUF012

    def token_bytes(self, token: int, *, skip_special: bool = True, first: bool = False) -> bytes:
        return self.table[token].lstrip() if first else self.table[token]


def texts(*tokens: int) -> list[str]:
    decoder = IncrementalDecoder(Bytes())
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


class Test_9_2:
    """IncrementalDecoder.push and flush"""

    def test_text_that_is_certain_comes_at_once(self):
        expect("push('Hi'), push(' you'), flush()", texts(1, 4), ["Hi", " you", ""])

    def test_half_a_character_waits(self):
        expect("push(half of é), push(the other half), flush()", texts(2, 3), ["", "é", ""])

    def test_half_a_character_at_the_end_is_shown_as_such(self):
        expect("push('Hi'), push(half of é), flush()", texts(1, 2), ["Hi", "", "\ufffd"])

    def test_what_can_not_go_on_is_replaced(self):
        expect("push(half of é), push('Hi'), flush()", texts(2, 1), ["", "\ufffdHi", ""])

    def test_the_first_token_of_a_text_may_look_different(self):
        expect("push(' you') first, push(' you'), flush()", texts(4, 4), ["you", " you", ""])

    def test_a_special_token_is_no_beginning(self):
        expect("push(special), push(' you'), flush()", texts(9, 4), ["", "you", ""])


class Desk(Hub):
    """A hub without processes: what would arrive for a call is there as soon as it is submitted."""

    def __init__(self, *arrivals):
        self.arrivals, self.left = arrivals, []

    async def submit(self, message, answers, generates):
        for arrival in self.arrivals:
            if (arrival.uids if isinstance(arrival, Accepted | Failed) else [arrival.uid])[0] in message.uids:
                answers.put_nowait(arrival)

    def abort(self, uids):
        self.left += sorted(uids)


def piece(uid: int, text: str, end: str | None = None) -> Piece:
    return Piece(uid, text, [1], end, prompt_tokens=1, cached_tokens=0)


def streamed(desk: Desk, *calls: list[int], at_most: int = 9) -> list[str]:
    """The texts that a stream of these calls gives, and "failed" if it ends like that; it is left after so many lists."""
    found = []

    async def run() -> None:
        lists = 0
        async with aclosing(desk.stream([SimpleNamespace(uids=uids) for uids in calls])) as stream:
            async for pieces in stream:
                found.extend(f"{piece.uid} {piece.text}" for piece in pieces)
                lists += 1
                if lists == at_most:
                    break

    try:
        asyncio.run(asyncio.wait_for(run(), 2))
    except RequestFailed as error:
        found.append(f"failed with {error.status}: {error.message}")
    return found


class Test_9_3:
    """Hub.stream"""

    def test_what_waits_comes_as_one_piece_for_a_sequence(self):
        desk = Desk(piece(1, "a"), piece(1, "b"), piece(1, "c", "stop"))
        expect("uid 1: a, b, and c with an end, all there", streamed(desk, [1]), ["1 abc"])

    def test_it_ends_when_every_sequence_has_its_end(self):
        desk = Desk(piece(1, "a", "stop"), piece(2, "b"), piece(2, "c", "stop"))
        expect("uids 1 and 2", sorted(streamed(desk, [1], [2])), ["1 a", "2 bc"])
        expect("uids aborted", desk.left, [])

    def test_a_failure_is_raised(self):
        desk = Desk(Failed([1], 500, "it died"))
        expect("a stream that fails", streamed(desk, [1]), ["failed with 500: it died"])
        expect("uids aborted: nobody has it any more", desk.left, [])

    def test_nothing_is_handed_out_before_the_engine_has_all_calls(self):
        desk = Desk(piece(1, "a", "stop"), Failed([2], 400, "too long"))
        expect("one of two calls is refused", streamed(desk, [1], [2]), ["failed with 400: too long"])

    def test_an_accepted_call_has_no_text_yet(self):
        expect("uid 1 accepted, then left", streamed(Desk(Accepted([1])), [1], at_most=1), [])

    def test_leaving_early_aborts_what_is_open(self):
        desk = Desk(piece(1, "a", "stop"), piece(2, "b"))
        streamed(desk, [1, 2], at_most=1)
        expect("uids aborted when the caller leaves: 1 has ended, 2 has not", desk.left, [2])
