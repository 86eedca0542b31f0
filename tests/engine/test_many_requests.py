"""Many requests, with cancels, failures and stop strings, twice: the same to the letter, nothing is left."""

import string

import pytest

import clusterkv_jax as ckv
from tests.engine.test_engine import WARM, engine, written
from tests.support.tiny import prompt

STOPS = tuple(string.ascii_letters + string.digits)  # a quarter of the tokens of `written`


def many(served, count):
    """Requests of all kinds, some cancelled on the way; what became of each."""
    context, handles = served.read(prompt(50, 40)), []
    for number in range(count):
        how = {"seed": number, "max_new_tokens": 1 + number % 11, "sampling": WARM if number % 4 == 0 else None}
        how["stop"] = STOPS if number % 5 == 2 else ()
        text = context if number % 3 == 0 else prompt(number, 20 + number % 40)
        handles.append(served.add(text, prompt(number, 1 + number % 6) if number % 2 else None, **how))
        with pytest.raises(ValueError, match="exceed"):
            served.add(prompt(number, 130))
        with pytest.raises(ValueError, match="temperature"):
            served.add(context, prompt(number, 2), sampling=ckv.Sampling(temperature=-1.0))
        with pytest.raises(ValueError, match="seed"):
            served.add(context, prompt(number, 2), sampling=WARM, seed=-1)
        if number % 7 == 3:
            served.step()
            handles[number - number % 5].cancel()
    served.run()
    served.drop(context)
    return [(handle.state, handle.result().tokens, handle.result().texts) for handle in handles]


def check_many(count):
    """So many requests, twice: the same to the letter, some stopped, and nothing is left."""
    outcomes = []
    for _ in range(2):
        served = engine(written())
        outcomes.append(many(served, count))
        stats = served.stats()
        assert (stats.waiting, stats.active, sum(stats.context_bytes.values())) == (0, 0, 0)
        assert stats.finished + stats.cancelled == count
        assert not served.busy
    assert outcomes[0] == outcomes[1]
    to_stop = [(1 + i % 11, *outcome) for i, outcome in enumerate(outcomes[0]) if i % 5 == 2]
    finished = [(most, tokens[0], texts[0]) for most, state, tokens, texts in to_stop if state == "finished"]
    assert any(len(tokens) < most for most, tokens, _ in finished)
    assert not any(stop in text for _, _, text in finished for stop in STOPS)


def test_sixty_requests_twice_are_the_same_and_leave_nothing():
    check_many(60)


@pytest.mark.exhaustive
def test_three_hundred_requests_twice_are_the_same_and_leave_nothing():
    check_many(300)
