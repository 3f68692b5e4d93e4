"""A learner's loop may have no end, so the limit of time is short here."""

import signal

import pytest

SECONDS = 20


@pytest.fixture(autouse=True)
def no_test_hangs():
    def give_up(*_):
        raise AssertionError(f"it did not come to its end in {SECONDS} seconds; is there a loop without an end?")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
