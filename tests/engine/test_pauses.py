"""While a long prompt is read, others go on speaking, and who cancels is heard."""

import pytest

from clusterkv_jax.engine import AsyncEngine, SamplingParams
from tests.engine.test_engine import EIGHT, alone, engine
from tests.support.tiny import prompt

LONG = SamplingParams(max_tokens=30, seed=1)


@pytest.mark.parametrize("stream", [True, False])
def test_streams_go_on_while_a_prompt_is_read(stream):
    served, said_while_waiting = engine(prefill_tokens=1), []

    def hear(output):
        said_while_waiting.append(second.state == "waiting")

    (first,) = served.submit(served.request(prompt(1, 30), params=LONG, stream=stream), hear)
    second = first
    served.step()
    second = served.add(prompt(2, 100), seed=2, **EIGHT)
    third = served.add(prompt(2, 100), prompt(903, 3), seed=2, **EIGHT)
    served.step()
    assert said_while_waiting.count(True) == (2 if stream else 0)  # after each of two layers
    served.run()
    assert tuple(first.result().tokens[0]) == alone(1, 30, new=30)
    assert tuple(second.result().tokens[0]) == alone(2, 100)
    assert tuple(third.result().tokens[0]) == alone(2, 100, 3)


def test_short_prompts_count_together_towards_a_pause():
    served, said = engine(prefill_tokens=100, slots=4), []
    (first,) = served.submit(served.request(prompt(1, 30), params=LONG, stream=True), said.append)
    served.step()
    before = len(said)
    for seed in (2, 3):
        served.add(prompt(seed, 40), seed=seed, **EIGHT)  # read in 64 tokens
    served.step()
    assert len(said) == before + 2  # between the layers of the second, and when all decode
    first.cancel()


def test_what_is_cancelled_while_it_is_read_is_read_no_further():
    served, pauses = engine(prefill_tokens=1, slots=1), []
    bad = served.add(prompt(3, 100), **EIGHT)
    good = served.add(prompt(4, 30), seed=4, **EIGHT)

    def cancel_first():
        pauses.append(bad.state)
        bad.cancel()

    served.on_pause(cancel_first)
    served.run()
    assert (bad.state, bad.result().tokens) == ("cancelled", [[]])
    assert tuple(good.result().tokens[0]) == alone(4, 30)
    assert pauses == ["waiting", "cancelled", "cancelled"]  # one layer of the first, two of the second
    assert (served.stats().active, served.stats().waiting) == (0, 0)


def test_a_listener_may_cancel_anybody():
    served = engine()
    handles = []

    def cancel_all(output):
        for handle in handles:
            handle.cancel()

    handles += served.submit(served.request(prompt(1, 30), params=LONG), cancel_all)
    handles += [served.add(prompt(1, 30), seed=1, **EIGHT) for _ in range(2)]
    served.run()
    assert {handle.state for handle in handles} == {"cancelled"}
    assert tuple(served.add(prompt(5, 25), seed=5, **EIGHT).result().tokens[0]) == alone(5, 25)


def test_requests_that_come_and_go_leave_nothing():
    served = AsyncEngine(engine(prefill_tokens=1, max_waiting=100))
    streams = []
    for number in range(30):
        params = SamplingParams(max_tokens=1 + number % 40, seed=number % 5, n=1 + number % 2)
        request = served.engine.request(prompt(number % 5, 20 + number % 3), params=params, stream=number % 3 == 0)
        streams.append(served.submit(request))
        if number % 4 == 0:
            streams[number // 2].cancel()
    reasons = [{output.finish_reason for output in stream} - {None} for stream in streams]
    assert all(each <= {"length", "cancelled"} for each in reasons)
    served.close()
    stats = served.stats()
    assert (stats.active, stats.waiting, stats.failed) == (0, 0, 0)
    assert stats.finished + stats.cancelled == 45
    assert (served._arriving, served._cancelled) == ({}, set())
