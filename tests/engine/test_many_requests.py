"""Three hundred requests, with cancels, failures and stop strings, twice: the same to the letter, nothing is left."""

import pytest

from tests.engine.test_engine import check_many


# Ordinary runs try sixty, in test_engine.
@pytest.mark.exhaustive
def test_three_hundred_requests_twice_are_the_same_and_leave_nothing():
    check_many(300)
