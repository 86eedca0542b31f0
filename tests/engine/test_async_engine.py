"""An engine behind its one thread: threads and asyncio ask it, and hear what is said alone."""

import asyncio
import threading

import pytest

import clusterkv_jax as ckv
from clusterkv_jax.engine import AsyncEngine, EngineFull, SamplingParams
from tests.engine.test_engine import alone, engine, written
from tests.support.tiny import prompt

EIGHT = SamplingParams(max_tokens=8)


@pytest.fixture
def served():
    made = AsyncEngine(engine())
    yield made
    made.close(drain=False)


def said(stream):
    """Tokens of each answer, put together from its pieces, and why it ended."""
    tokens, reasons = {}, {}
    for output in stream:
        tokens.setdefault(output.index, []).extend(output.token_ids)
        if output.finish_reason:
            reasons[output.index] = output.finish_reason
            assert output.result.tokens == [tokens[output.index]]
    return tokens, reasons


def test_threads_hear_what_is_said_alone(served):
    heard = {}

    def ask(seed):
        params = SamplingParams(max_tokens=8, seed=seed)
        heard[seed] = said(served.submit(served.engine.request(prompt(seed, 20 + seed), params=params)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: tuple(tokens[0]) for seed, (tokens, _) in heard.items()} == {
        seed: alone(seed, 20 + seed) for seed in range(6)
    }
    assert all(reasons == {0: "length"} for _, reasons in heard.values())


def test_a_stream_that_has_ended_wakes_nobody(served, monkeypatch):
    cancelled = []
    monkeypatch.setattr(served.engine, "cancel", cancelled.append)
    ended, left = (served.submit(served.engine.request(prompt(seed, 20), params=EIGHT)) for seed in range(2))
    assert said(ended)[1] == {0: "length"}
    ended.cancel()
    left.cancel()
    served.call(lambda engine: None).result()
    assert cancelled == [left.request.request_id]


def test_asyncio_hears_streams_side_by_side(served):
    async def ask(seed):
        request = served.engine.request(prompt(seed, 25), params=SamplingParams(max_tokens=8, seed=seed), stream=True)
        return tuple([token async for output in served.submit(request) for token in output.token_ids])

    async def ask_all():
        return await asyncio.gather(*(ask(seed) for seed in range(5)))

    assert asyncio.run(ask_all()) == [alone(seed, 25) for seed in range(5)]


def test_answers_to_one_prompt_draw_by_seeds_that_follow(served):
    warm = SamplingParams(n=3, temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=6)
    context = served.call(lambda owned: owned.read(prompt(7, 30), seed=7)).result()
    tokens, reasons = said(served.submit(served.engine.request(context, params=warm)))
    how = ckv.Sampling(temperature=0.8, top_k=20, top_p=0.9)
    assert [tuple(tokens[i]) for i in range(3)] == [
        tuple(engine().add(prompt(7, 30), max_new_tokens=6, sampling=how, seed=7 + i).result().tokens[0])
        for i in range(3)
    ]
    assert set(reasons.values()) == {"length"}


def test_text_of_pieces_is_the_whole_text():
    served = AsyncEngine(engine(written(), method=ckv.Full()))
    request = served.engine.request("Some text to begin with.", params=SamplingParams(max_tokens=40))
    pieces = list(served.submit(request))
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.texts[0] != ""
    served.close()


def test_who_stops_listening_leaves_the_slot(served):
    long = SamplingParams(max_tokens=60)
    streams = [served.submit(served.engine.request(prompt(1, 30), params=long, stream=True)) for _ in range(3)]
    for stream in streams:
        assert next(iter(stream)).token_ids
        stream.cancel()
        stream.cancel()
    after = said(served.submit(served.engine.request(prompt(2, 30), params=SamplingParams(max_tokens=8, seed=2))))
    assert tuple(after[0][0]) == alone(2, 30)
    stats = served.stats()
    assert (stats.cancelled, stats.active, stats.waiting) == (3, 0, 0)


def test_a_full_queue_says_when_to_come_back():
    owned = engine(slots=1, max_waiting=2)
    requests = [owned.request(prompt(1, 20), params=EIGHT) for _ in range(3)]
    for request in requests[:2]:
        owned.check_room(request)
        owned.submit(request)
    with pytest.raises(EngineFull, match=r"The engine's queue is full: 2 wait; come back in .* s\.") as error:
        owned.check_room(requests[2])
    assert error.value.retry_after_s > 0
    with pytest.raises(EngineFull):
        owned.add(prompt(1, 20), wait=False)
    owned.run()
    assert owned.add(prompt(1, 20), wait=False, max_new_tokens=1).result().tokens


def test_closing_waits_for_what_was_handed_over():
    served = AsyncEngine(engine(slots=1))
    streams = [served.submit(served.engine.request(prompt(1, 30), params=EIGHT)) for _ in range(3)]
    served.close()
    assert [said(stream)[1] for stream in streams] == [{0: "length"}] * 3
    with pytest.raises(RuntimeError, match="is closed"):
        served.submit(served.engine.request(prompt(1, 30)))
    served.close()


def test_what_fails_is_raised_where_it_is_heard(served):
    with pytest.raises(ValueError, match="exceed the engine's max_tokens"):
        served.engine.request(prompt(1, 126), params=EIGHT)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        served.call(lambda owned: owned.read([])).result()

    def broken():
        raise RuntimeError("The device is gone.")

    served.engine._core.runner.decode = lambda *args: broken()
    stream = served.submit(served.engine.request(prompt(1, 30), params=EIGHT))
    with pytest.raises(RuntimeError, match="The device is gone"):
        list(stream)
    served._thread.join()
    with pytest.raises(RuntimeError, match=r"The engine has failed: The device is gone\."):
        served.submit(served.engine.request(prompt(1, 30), params=EIGHT))
    assert not served.is_alive
