"""A conversation is one text: its turns go into the cache as the template writes them, and a file goes on with it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import conversation
from tests.support.byte_model import byte_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = ("All visible objects, man, are but as pasteboard masks. " * 3)[:150]
QUESTIONS = ("Who?", "Where was it?", "And then?", "Why?")
NEW = 12
KEPT = ckv.CentroidKV(ckv.Budget(tokens=64), sinks=4, recent=8, interval=32)


@pytest.fixture(scope="module")
def model():
    return byte_model(TEMPLATE)


def talked(begun, questions=QUESTIONS):
    """The conversation after some questions, and the answers."""
    answers = []
    for question in questions:
        begun, answer = conversation.ask(begun, question)
        answers.append(answer)
    return begun, answers


def test_turns_are_one_text_to_the_full_cache(model, monkeypatch):
    monkeypatch.setattr(conversation, "ROOM", 16)  # so that it is read again once
    ids = model.tokenizer.encode
    begun = conversation.start(model, TEXT, method="full", max_new_tokens=NEW)
    before = ids(f"<user>{TEXT}\n\n{QUESTIONS[0]}</user><assistant>")
    now, answers = talked(begun)
    for answer, question in zip(answers, [*QUESTIONS[1:], None], strict=True):
        assert answer.tokens == ckv.generate(model, [before], method="full", max_new_tokens=NEW).tokens[0]
        assert answer.finish_reason == "length"
        before += [*answer.tokens, *ids(f"</assistant><user>{question}</user><assistant>")]
    assert [answer.read_again for answer in answers] == [False, False, True, False]
    assert (*now.tokens, *now.pending) == tuple(before[: len(now.tokens) + 1])
    held = conversation.size(now)
    assert held.rows == held.tokens == len(now.tokens) == int(now.cache.position[0])
    full, nbytes = conversation.ask_full(now)
    assert full.tokens == answers[-1].tokens
    assert nbytes >= held.full_bytes


def test_an_answer_that_ended_is_followed_by_the_template_alone(model):
    """The model's own end of an answer is not in the cache, and the template's is once."""
    first = conversation.ask(conversation.start(model, TEXT, max_new_tokens=NEW), "Who?")[1].tokens
    ending = replace(model, config=replace(model.config, eos_ids=(first[2],)))
    now, answer = conversation.ask(conversation.start(ending, TEXT, max_new_tokens=NEW), "Who?")
    assert (answer.finish_reason, answer.tokens, now.pending) == ("eos", first[:3], ())
    later, _ = conversation.ask(now, "Where?")
    said = model.tokenizer.encode("</assistant><user>Where?</user><assistant>")
    assert list(later.tokens[now.asked : later.asked]) == [*first[:2], *said]


def test_without_a_template_turns_stand_a_blank_line_apart():
    plain = byte_model()
    now, (first, second) = talked(conversation.start(plain, TEXT, max_new_tokens=4), QUESTIONS[:2])
    ids = plain.tokenizer.encode
    text = [*ids(f"{TEXT}\n\n{QUESTIONS[0]}"), *first.tokens, *ids(f"\n\n{QUESTIONS[1]}")]
    assert list(now.tokens[: now.asked]) == text
    assert second.tokens == ckv.generate(plain, [text], max_new_tokens=4).tokens[0]


@pytest.fixture(scope="module")
def compressed(model):
    return talked(conversation.start(model, TEXT, method=KEPT, max_new_tokens=NEW), QUESTIONS[:3])


def test_what_is_said_is_compressed_with_the_text(model, compressed):
    now, answers = compressed
    assert len(now.tokens) > 250
    assert 64 <= conversation.size(now).rows < 64 + 32
    begun = conversation.start(model, TEXT, method=KEPT, max_new_tokens=NEW)
    assert conversation.size(begun).cache_bytes == conversation.size(now).cache_bytes
    assert [answer.compile_s for answer in answers[1:]] == [0, 0]
    assert not any(answer.read_again for answer in answers)
    again, answer = conversation.ask(begun, QUESTIONS[0])  # which changed nothing of where it began
    assert answer.tokens == answers[0].tokens
    assert conversation.ask(begun, QUESTIONS[0])[1].tokens == answer.tokens
    assert again.turns == 1


def test_a_saved_conversation_goes_on_bit_for_bit(model, compressed, tmp_path):
    now, _ = compressed
    conversation.save(tmp_path / "talk.ckv", now)
    loaded = conversation.load(tmp_path / "talk.ckv", model, method=KEPT, max_new_tokens=NEW)
    ours, theirs = talked(now, QUESTIONS[3:])[0], talked(loaded, QUESTIONS[3:])[0]
    assert ours.tokens == theirs.tokens
    assert ours.messages == theirs.messages
    for a, b in zip(jax.tree.leaves(ours.cache), jax.tree.leaves(theirs.cache), strict=True):
        assert np.array_equal(a, b)
    assert [file.name for file in tmp_path.iterdir()] == ["talk.ckv"]


def test_what_is_no_conversation_is_refused(model, compressed, tmp_path):
    now, _ = compressed
    ckv.save_cache(tmp_path / "cache.ckv", now.cache, model.config, KEPT)
    with pytest.raises(ValueError, match="holds a cache and no conversation"):
        conversation.load(tmp_path / "cache.ckv", model, method=KEPT)
    wrong = {"tokens": now.tokens[1:], "messages": now.messages[1:]}
    for name, said in zip(wrong, ("must hold the tokens of its cache", "in turns"), strict=True):
        conversation.save(tmp_path / "wrong.ckv", replace(now, **{name: wrong[name]}))
        with pytest.raises(ValueError, match=said):
            conversation.load(tmp_path / "wrong.ckv", model, method=KEPT)
    conversation.save(tmp_path / "talk.ckv", now)
    with pytest.raises(ValueError, match=r"was made by CentroidKV\("):
        conversation.load(tmp_path / "talk.ckv", model, method="full")


def test_an_answer_may_be_stopped(model):
    begun, shown = conversation.start(model, TEXT, max_new_tokens=64), []
    now, answer = conversation.ask(begun, "Who?", on_text=shown.append, stopped=lambda: bool(shown))
    assert answer.finish_reason == "cancelled"
    assert 1 <= len(answer.tokens) < 64
    assert "".join(shown) == answer.text
    later, _ = conversation.ask(now, "Where?")
    text = list(later.tokens[: later.asked])
    assert text[now.asked : now.asked + len(answer.tokens)] == answer.tokens


def test_draws_differ_by_turn_and_seed(model):
    drawn = {"max_new_tokens": NEW, "sampling": ckv.Sampling(temperature=1.0)}
    answers = [conversation.ask(conversation.start(model, TEXT, seed=s, **drawn), "Who?")[1] for s in (5, 5, 6)]
    assert answers[0].tokens == answers[1].tokens != answers[2].tokens


@pytest.mark.parametrize(
    ("question", "said"),
    [(" \n", "A question must have at least one word"), ("w" * 400, "exceed the model's 512 positions")],
)
def test_a_turn_that_cannot_be_leaves_the_conversation(compressed, question, said):
    now, _ = compressed
    with pytest.raises(ValueError, match=said):
        conversation.ask(now, question)
    assert conversation.ask(now, "Why?")[0].turns == now.turns + 1


def test_nothing_was_asked_yet(model):
    with pytest.raises(ValueError, match="Nothing was asked yet"):
        conversation.ask_full(conversation.start(model, TEXT))
