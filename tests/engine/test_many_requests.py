"""Three hundred requests with cancels and failures, twice: the same to the letter, and nothing is left."""

import pytest

from tests.engine.test_engine import engine, many


# Ordinary runs try sixty, in test_engine.
@pytest.mark.exhaustive
def test_three_hundred_requests_twice_are_the_same_and_leave_nothing():
    outcomes = []
    for _ in range(2):
        served = engine()
        outcomes.append(many(served, 300))
        stats = served.stats()
        assert (stats.waiting, stats.active, sum(stats.context_bytes.values())) == (0, 0, 0)
        assert stats.finished + stats.cancelled == 300
    assert outcomes[0] == outcomes[1]
