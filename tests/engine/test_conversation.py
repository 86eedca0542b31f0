"""A conversation is one text: its turns go into the cache as the template writes them, and a file goes on with it."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.engine import conversation
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


def begun(model, method="full", text=TEXT, **options):
    """A conversation that has read a text."""
    talk = ckv.Conversation(model, method=method, max_tokens=512, **{"max_new_tokens": NEW, **options})
    talk.read(text)
    return talk


def said(talk, *questions):
    """The results of some questions."""
    results = []
    for question in questions:
        text = "".join(talk.say(question))
        results.append(talk.result)
        assert text == talk.result.texts[0] == talk.messages[-1]["content"]
    return results


def test_turns_are_one_text_to_the_full_cache(model):
    ids = model.tokenizer.encode
    talk = begun(model)
    assert (talk.tokens, talk.read_tokens, talk.turns) == (len(f"<user>{TEXT}"), len(f"<user>{TEXT}"), 0)
    before = ids(f"<user>{TEXT}\n\n{QUESTIONS[0]}</user><assistant>")
    read = len(before) - talk.tokens
    for turn, question in enumerate(QUESTIONS, 1):
        (result,) = said(talk, question)
        assert (talk.prompt, talk.read_tokens, talk.turns) == (before, read, turn)
        assert talk.rows == talk.tokens == len(before) + NEW - 1
        assert result.tokens == ckv.generate(model, [before], method="full", max_new_tokens=NEW).tokens
        assert result.finish_reasons == ["length"]
        new = ids(f"</assistant><user>{QUESTIONS[turn % 4]}</user><assistant>")
        before, read = [*before, *result.tokens[0], *new], len(new) + 1
    assert talk.nbytes > 0


def test_an_answer_that_ended_is_followed_by_the_template_alone(model):
    """The model's own end of an answer is not in the cache, and the template's is once."""
    (first,) = said(begun(model), "Who?")
    tokens = first.tokens[0][:3]
    talk = begun(replace(model, config=replace(model.config, eos_ids=tuple(tokens[2:]))))
    (answer,) = said(talk, "Who?")
    assert (answer.finish_reasons, answer.tokens) == (["eos"], [tokens])
    asked = talk.prompt
    said(talk, "Where?")
    assert talk.prompt == [*asked, *tokens[:2], *model.tokenizer.encode("</assistant><user>Where?</user><assistant>")]


def test_without_a_template_turns_stand_a_blank_line_apart():
    plain = byte_model()
    talk = begun(plain, max_new_tokens=4)
    first, second = said(talk, *QUESTIONS[:2])
    ids = plain.tokenizer.encode
    text = [*ids(f"{TEXT}\n\n{QUESTIONS[0]}"), *first.tokens[0], *ids(f"\n\n{QUESTIONS[1]}")]
    assert talk.prompt == text
    assert second.tokens == ckv.generate(plain, [text], max_new_tokens=4).tokens


def test_a_conversation_may_begin_with_a_question_and_read_later(model):
    ids = model.tokenizer.encode
    talk = ckv.Conversation(model, max_tokens=512, max_new_tokens=4, system="Be brief.")
    (first,) = said(talk, "Who?")
    text = ids("<system>Be brief.</system><user>Who?</user><assistant>")
    assert (talk.prompt, talk.read_tokens) == (text, len(text))
    talk.read("A text.")
    new = ids("</assistant><user>A text.")
    assert talk.read_tokens == len(new) + 1
    said(talk, "Where?")
    assert talk.prompt == [*text, *first.tokens[0], *new, *ids("\n\nWhere?</user><assistant>")]


def test_a_long_turn_enters_in_parts(model, monkeypatch):
    whole, parts = begun(model), begun(model)
    said(whole, "w" * 90)
    monkeypatch.setattr(conversation, "ROOM", 32)
    said(parts, "w" * 90)
    assert (parts.result.tokens, parts.prompt, parts.read_tokens) == (
        whole.result.tokens,
        whole.prompt,
        whole.read_tokens,
    )


@pytest.fixture(scope="module")
def compressed(model):
    talk = begun(model, KEPT)
    talk.compile()
    return talk, said(talk, *QUESTIONS[:3])


def test_what_is_said_is_compressed_with_the_text(model, compressed):
    talk, results = compressed
    assert talk.tokens > 250
    assert 64 <= talk.rows < 64 + 32
    # The first turn compiles what brings rows back to their budget.
    assert [result.stats.compile_s for result in results[1:]] == [0, 0]
    assert all(result.stats.cached_tokens[0] > 0 for result in results)


def test_a_text_that_is_read_gated(model, tmp_path):
    """Within the window nothing changes; beyond it as many rows stay, and a file goes on in the same way."""
    gated = {"reading": "gated", "window": 200, "chunk": 64}
    within = said(begun(model, KEPT, **gated), *QUESTIONS[:2])
    assert [result.tokens for result in within] == [
        result.tokens for result in said(begun(model, KEPT), *QUESTIONS[:2])
    ]
    talk = begun(model, KEPT, **gated | {"window": 48, "chunk": 32})
    assert talk.rows == begun(model, KEPT).rows == 64
    talk.save(tmp_path / "talk.ckv")
    again = ckv.Conversation.load(tmp_path / "talk.ckv", model)
    assert [x.tokens for x in said(again, *QUESTIONS[:2])] == [x.tokens for x in said(talk, *QUESTIONS[:2])]
    with pytest.raises(ValueError, match="SnapKV needs later queries"):
        begun(model, ckv.SnapKV(ckv.Budget(tokens=64)), reading="gated")


def test_a_fork_goes_its_own_way(compressed):
    talk, _ = compressed
    one, other = talk.fork(), talk.fork()
    (here,), (there,) = said(one, "Why?"), said(other, "Why?")
    assert here.tokens == there.tokens
    assert (one.turns, talk.turns) == (4, 3)
    said(other, "How?")
    assert one.messages == other.messages[:-2]


def test_a_saved_conversation_goes_on_bit_for_bit(model, compressed, tmp_path):
    talk, _ = compressed
    ours = talk.fork()
    ours.save(tmp_path / "talk.ckv")
    theirs = ckv.Conversation.load(tmp_path / "talk.ckv", model)
    assert (theirs.method, theirs.rows, theirs.messages) == (KEPT, ours.rows, tuple(ours.messages))
    for talk in (ours, theirs):
        said(talk, *QUESTIONS[3:])
        talk.save(tmp_path / f"{talk is ours}.ckv")
    assert ours.result.tokens == theirs.result.tokens
    caches = [ckv.load_cache(tmp_path / f"{which}.ckv", model.config, KEPT) for which in (True, False)]
    for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
        assert np.array_equal(a, b)
    assert {file.name for file in tmp_path.iterdir()} == {"talk.ckv", "True.ckv", "False.ckv"}


def test_what_is_no_conversation_is_refused(model, compressed, tmp_path):
    talk, _ = compressed
    with pytest.raises(ValueError, match="There is nothing to save yet"):
        ckv.Conversation(model, max_tokens=512).save(tmp_path / "new.ckv")
    file = tmp_path / "talk.ckv"
    talk.save(file)
    cache, told = ckv.load_cache(file, model.config, KEPT), saving.origin(file)
    ckv.save_cache(file, cache, model.config, KEPT)
    with pytest.raises(ValueError, match="holds a cache and no conversation"):
        ckv.Conversation.load(file, model)
    wrong = {"must hold its 3": told["token_ids"][1:], "as token_ids, got 3": 3, "must hold the tokens": []}
    for sentence, tokens in wrong.items():
        ckv.save_cache(file, cache, model.config, KEPT, origin=told | {"token_ids": tokens})
        with pytest.raises(ValueError, match=sentence):
            ckv.Conversation.load(file, model)
    turns = json.loads(json.dumps(told))
    turns["conversation"]["messages"].pop()
    ckv.save_cache(file, cache, model.config, KEPT, origin=turns)
    with pytest.raises(ValueError, match="in turns"):
        ckv.Conversation.load(file, model)
    with pytest.raises(ValueError, match=r"was made by CentroidKV\("):
        ckv.Conversation.load(file, model, method=ckv.Full())


def test_an_answer_may_be_stopped(model):
    talk = begun(model, max_new_tokens=64)
    pieces = talk.say("Who?")
    shown = next(pieces)
    pieces.close()
    (tokens,), asked = talk.result.tokens, talk.prompt
    assert talk.result.finish_reasons == ["cancelled"]
    assert 1 <= len(tokens) < 64
    assert talk.messages[-1]["content"].startswith(shown)
    said(talk, "Where?")
    assert talk.prompt[: len(asked) + len(tokens)] == [*asked, *tokens]


def test_draws_differ_by_turn_and_seed(model):
    drawn = {"sampling": ckv.Sampling(temperature=1.0)}
    answers = [said(begun(model, seed=seed, **drawn), "Who?")[0] for seed in (5, 5, 6)]
    assert answers[0].tokens == answers[1].tokens != answers[2].tokens


@pytest.mark.parametrize(
    ("question", "sentence"),
    [(" \n", "A message must have at least one word"), ("w" * 400, "exceed the 512 tokens that it has room for")],
)
def test_a_turn_that_cannot_be_leaves_the_conversation(compressed, question, sentence):
    talk = compressed[0].fork()
    with pytest.raises(ValueError, match=sentence):
        next(talk.say(question))
    said(talk, "Why?")
    assert talk.turns == compressed[0].turns + 1


SHOWN = "{% for m in messages %}<{{ m.role }}>CONTENT</{{ m.role }}>{% endfor %}<assistant>"


@pytest.mark.parametrize("content", ["{{ messages[0].content }}", "{{ m.content | upper }}"])
def test_an_answer_is_shown_once_and_whole(content):
    talk = ckv.Conversation(byte_model(SHOWN.replace("CONTENT", content)), max_tokens=512, max_new_tokens=2)
    with pytest.raises(ValueError, match="must show an answer once and whole"):
        print(*talk.say("Who?"), *talk.say("Where?"))


def test_a_template_that_writes_answers_anew_is_told():
    """The cache keeps what the model read and wrote, and the next turn what the template puts behind that."""
    shown = "{% if m.role == 'assistant' %}(He said:) {% endif %}{{ m.content }}"
    talk = ckv.Conversation(byte_model(SHOWN.replace("CONTENT", shown)), max_tokens=512, max_new_tokens=6)
    (first,) = said(talk, "Who?")
    asked = talk.prompt
    with pytest.warns(UserWarning, match="would write what was said anew"):
        said(talk, "Where?")
    ids = talk.model.tokenizer.encode
    assert talk.prompt == [*asked, *first.tokens[0], *ids("</assistant><user>Where?</user><assistant>")]
