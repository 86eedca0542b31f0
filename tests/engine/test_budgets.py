"""Budgets of an engine's requests: those of the request, over contexts too."""

import pytest

import clusterkv_jax as ckv
from tests.support.tiny import prompt, tiny


def test_a_context_is_read_again_for_another_budget():
    """A share of prompt and answer depends on how long the answer may be."""
    method = ckv.SnapKV(ckv.Budget(ratio=0.4, base="prompt+new"), window=4, kernel=3)
    engine = ckv.Engine(tiny(), method=method, slots=2, max_tokens=200, reserve=100)
    text, question = prompt(1, 60), prompt(2, 5)
    context = engine.read(text)
    for new in (8, context.max_new_tokens, 30):
        asked = {"max_new_tokens": new}
        alone = ckv.generate(tiny(), [text], questions=[question], method=method, **asked)
        result = engine.add(context, question, **asked).result()
        assert result.tokens == alone.tokens
        assert result.stats.kept_rows == alone.stats.kept_rows
        assert result.stats.kept_rows[0][0][0] == int(0.4 * (60 + new))


def test_a_budget_that_another_answer_makes_impossible_is_refused_at_once():
    method = ckv.SnapKV(ckv.Budget(ratio=0.1, base="prompt+new"), window=8, kernel=3)
    engine = ckv.Engine(tiny(), method=method, slots=1, max_tokens=200, reserve=100)
    context = engine.read(prompt(1, 60))
    with pytest.raises(ValueError, match="a prompt of 60 tokens has a budget of 6 rows"):
        engine.add(context, prompt(2, 5), max_new_tokens=5)
