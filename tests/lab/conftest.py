"""A learner's loop may have no end, so the limit of time is short here."""

import pytest

from tests.conftest import time_limit

SECONDS = 20


@pytest.fixture(autouse=True)
def no_test_hangs():
    message = f"it did not come to its end in {SECONDS} seconds; is there a loop without an end?"
    with time_limit(SECONDS, AssertionError(message)):
        yield
