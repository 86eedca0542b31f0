"""Prompts that are too short for their budget: an error, or kept whole beside others that are compressed."""

import pytest

import clusterkv_jax as ckv
from tests.support.tiny import prompt, tiny

QUARTER = ckv.Budget(ratio=0.25)
UNEQUAL = ckv.Budget(ratio=0.25, shares=((1.5, 0.5),))
SHAPE = {"sinks": 4, "recent": 8, "chunk": 16, "interval": 4}
LONG, SHORT = prompt(1, 120), prompt(2, 30)
MODEL = tiny(layers=1)
METHODS = {
    "merged": ckv.CentroidKV(QUARTER, **SHAPE),
    "unequal heads": ckv.CentroidKV(UNEQUAL, **SHAPE),
    "windowed": ckv.SnapKV(QUARTER, window=8, kernel=3),
    "pages": ckv.AdaKV(QUARTER, window=8, kernel=3, decode_interval=4),
    "ring": ckv.StreamingLLM(QUARTER, sinks=8),
}


def rows(result, at):
    """Rows of each layer and head of one prompt."""
    return [layer[at] for layer in result.stats.kept_rows]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_short_prompts_are_kept_whole_beside_others(method):
    asked = {"max_new_tokens": 10}
    with pytest.raises(ValueError, match="a prompt of 30 tokens has a budget of"):
        ckv.generate(MODEL, [LONG, SHORT], method=method, **asked)
    both = ckv.generate(MODEL, [LONG, SHORT], method=method, keep_short=True, **asked)
    whole = ckv.generate(MODEL, [SHORT], **asked)
    alone = ckv.generate(MODEL, [LONG], method=method, **asked)
    assert both.tokens == alone.tokens + whole.tokens
    assert rows(both, 0) == rows(alone, 0)
    assert rows(both, 1) == [[30, 30]]


def test_an_engine_keeps_short_prompts_whole():
    method = METHODS["merged"]
    engine = ckv.Engine(MODEL, method=method, slots=2, max_tokens=160, reserve=32, keep_short=True)
    handles = [engine.add(text, max_new_tokens=10) for text in (LONG, SHORT)]
    both = ckv.generate(MODEL, [LONG, SHORT], method=method, keep_short=True, max_new_tokens=10)
    assert [handle.result().tokens[0] for handle in handles] == both.tokens
    assert rows(handles[1].result(), 0) == [[30, 30]]
    with pytest.raises(ValueError, match="a prompt of 30 tokens has a budget of 7 rows"):
        ckv.Engine(MODEL, method=method, slots=1, max_tokens=160, reserve=32).add(SHORT, max_new_tokens=10)


@pytest.mark.wrong_arguments
def test_a_budget_that_is_impossible_for_long_prompts_too_stays_an_error():
    asked = {"method": ckv.CentroidKV(ckv.Budget(tokens=10)), "max_new_tokens": 4}
    with pytest.raises(ValueError, match="a budget of 10 rows, which must be more than sinks"):
        ckv.generate(MODEL, [LONG], keep_short=True, **asked)
    with pytest.raises(ValueError, match="keep_short must be True or False, got 1"):
        ckv.generate(MODEL, [LONG], keep_short=1, **asked)
