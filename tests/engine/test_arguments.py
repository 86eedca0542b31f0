"""What a caller may leave out, and what is refused, in an engine."""

import pytest

import clusterkv_jax as ckv
from tests.engine.test_engine import EIGHT, engine, written
from tests.support.tiny import prompt


def test_a_context_takes_no_more_room_than_there_is():
    """Nobody says how long its answers are: a small reserve, or a prompt that nearly fills a slot, is no obstacle."""
    served = engine(reserve=16)
    context = served.read(prompt(1, 60))
    assert context.max_new_tokens == 16
    assert len(served.add(context, prompt(2, 3), **EIGHT).result().tokens[0]) == 8
    served = engine()
    context = served.read(prompt(1, 116))
    assert len(served.add(context, prompt(2, 3), **EIGHT).result().tokens[0]) == 8
    assert served.read(prompt(1, 60)).max_new_tokens == 64
    with pytest.raises(ValueError, match="exceed the engine's max_tokens = 128"):
        served.read(prompt(1, 128))


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": "a text"}, "prompts must be a list of texts or of token ids, got 'a text'; put it in a list"),
        ({"prompts": None}, "prompts must be a list"),
        ({"prompts": {"a text": 1}}, "prompts must be a list"),
        ({"prompts": ["a", "b"], "questions": "cd"}, "questions must be a list"),
    ],
)
def test_many_prompts_are_a_list(arguments, sentence):
    """A text is not the list of its letters."""
    with pytest.raises(ValueError, match=sentence):
        engine(written(), method=ckv.Full()).generate(**arguments, **EIGHT)


@pytest.mark.wrong_arguments
def test_no_engine_drops_a_context_of_another():
    served, other = engine(), engine()
    context, foreign = served.read(prompt(1, 20)), other.read(prompt(2, 20))
    for wrong in (foreign, 0):
        with pytest.raises(ValueError, match="context must be one that this engine has read"):
            served.drop(wrong)
    assert served.stats().contexts["device"] == 1
    served.drop(context)
    assert served.stats().contexts["device"] == 0
