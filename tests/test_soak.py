"""A short run of tests/soak.py, whose docstring says what it is; a long one is `python -m tests.soak --seconds 600`."""

import sys

import pytest

from tests.soak import soak


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_short_soak(text_checkpoint):
    report = soak(text_checkpoint.path, 20)
    assert report.faults == []
    assert {name.split("-")[0] for name in report.kills} == {"scheduler", "detokenizer", "tokenizer"}
    assert {way for way, result in report.outcomes if result == "whole"} >= {"whole", "stream", "slow", "count"}
    assert sum(count for (_, result), count in report.outcomes.items() if result == "whole") > 20
    assert report.outcomes["deaf", "left"] and report.outcomes["nonsense", "refused"]
