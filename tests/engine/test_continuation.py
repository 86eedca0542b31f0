"""What an answer leaves: a conversation goes on from its cache, and reads what is new."""

import gc
from dataclasses import replace

import numpy as np
import pytest

import clusterkv_jax as ckv
from tests.engine.test_engine import METHOD, engine, written
from tests.support.methods import every_method, named
from tests.support.tiny import prompt, taught, tiny

HALF = 0.5  # the budget of METHOD
TURNS, SEA = 30, "The sea was calm, and nobody spoke."


def talk(served, turns, first=20, each=3, new=4):
    """A conversation of random questions: results, the tokens before each answer, and what the last one has left."""
    results, heard, context, asked = [], [], None, prompt(0, first)
    for turn in range(turns):
        given = (asked,) if context is None else (context, asked)
        handle = served.add(*given, max_new_tokens=new, keep=True)
        heard.append([*(() if context is None else context.tokens), *asked])
        results.append(handle.result())
        context, asked = handle.context, [results[-1].tokens[0][-1], *prompt(turn + 1, each)]
    return results, heard, context


def test_thirty_turns_of_the_full_cache_are_those_of_a_conversation_that_is_read_anew():
    served = engine(method=ckv.Full(), max_tokens=256)
    results, heard, context = talk(served, TURNS)
    assert context.tokens == (*heard[-1], *results[-1].tokens[0][:-1])
    assert served.rows(context)[0] == context.length
    for turn, (result, before) in enumerate(zip(results, heard, strict=True)):
        counts = result.stats.cached_tokens, result.stats.question_tokens
        assert counts == (([len(before) - 4], [4]) if turn else ([0], [0]))
        if turn % 7 == 1:
            assert ckv.generate(tiny(), [before], max_new_tokens=4).tokens == result.tokens


@pytest.mark.parametrize("shares", [None, ((1.5, 0.5), (0.5, 1.5))])
def test_the_budget_grows_with_the_conversation(shares):
    served = engine(max_tokens=256, method=replace(METHOD, budget=ckv.Budget(ratio=HALF, shares=shares)))
    results, _, context = talk(served, 20)
    rows, nbytes = served.rows(context)
    budget = HALF * context.length
    assert 0.9 * budget < rows < budget + METHOD.interval
    assert nbytes >= results[-1].stats.cache_bytes
    assert results[-1].stats.cached_tokens == [context.length - 4 - 3]
    assert context.length > 3 * HALF * results[0].stats.prompt_tokens[0]
    compacted = served.compact(context)
    of_heads = 0.5 if shares else 0  # each head's share is rounded
    assert served.rows(compacted)[0] == pytest.approx(min(rows, int(budget)), abs=of_heads)
    assert compacted.tokens == context.tokens
    assert len(served.add(compacted, prompt(1, 3), max_new_tokens=4).result().tokens[0]) == 4


@pytest.mark.parametrize("shares", [None, ((1.5, 0.5), (0.5, 1.5))])
def test_a_context_is_compacted_beside_itself_and_waits_for_no_compiler(shares):
    """The first answer that was kept has compiled it, but for the copy."""
    method = replace(METHOD, budget=ckv.Budget(ratio=HALF, shares=shares), interval=24)
    served = engine(max_tokens=248, method=method)  # which nothing else compiles
    *_, context = talk(served, 15)
    rows, asked = served.rows(context), prompt(1, 3)
    said = served.add(context, asked, max_new_tokens=4).result().tokens
    before = served.stats().programs
    assert served.rows(served.compact(context))[0] < rows[0]
    assert served.stats().programs <= before + 1
    assert served.rows(context) == rows
    assert served.add(context, asked, max_new_tokens=4).result().tokens == said


def test_a_fork_is_another_question_and_what_nobody_holds_is_forgotten():
    served = engine()
    first = served.add(prompt(1, 30), max_new_tokens=5, keep=True)
    said = first.result().tokens[0]
    one, other = (served.add(first.context, [said[-1], i], max_new_tokens=5, keep=True) for i in (1, 2))
    again = served.add(first.context, [said[-1], 1], max_new_tokens=5)
    assert one.result().tokens == again.result().tokens
    assert other.context.tokens == (*prompt(1, 30), *said, 2, *other.result().tokens[0][:-1])
    assert served.stats().contexts["device"] + served.stats().contexts["host"] == 3
    del first, other
    gc.collect()
    served.add(one.context, [0], max_new_tokens=2, keep=True).result()
    assert sum(served.stats().contexts.values()) == 2


def test_what_is_gone_is_read_again_and_said_to_be():
    served = engine(method=ckv.Full())
    handle = served.add(prompt(1, 30), max_new_tokens=5, keep=True)
    said = handle.result().tokens[0]
    served.drop(handle.context)
    asked = {"max_new_tokens": 5}
    again = served.add(handle.context, [said[-1], 7], **asked).result()
    kept = served.add(handle.context, [said[-1], 7], **asked).result()
    assert (again.stats.cached_tokens, kept.stats.cached_tokens) == ([0], [34])
    assert again.tokens == kept.tokens == ckv.generate(tiny(), [[*prompt(1, 30), *said, 7]], **asked).tokens


def test_an_answer_that_is_stopped_leaves_what_its_cache_has_seen():
    served = engine(written(), slots=1)
    whole = served.add(SEA, max_new_tokens=12).result().texts[0]
    stopped = served.add(SEA, max_new_tokens=12, stop=[whole[2:4]], keep=True)
    assert stopped.result().finish_reasons == ["stop"]
    assert stopped.context is None  # its slot had gone on behind the stop
    cancelled = served.add(SEA, max_new_tokens=40, keep=True)
    served.step()
    cancelled.cancel()
    said = cancelled.result().tokens[0]
    assert cancelled.context.tokens == (*written().tokenizer.encode(SEA), *said[:-1])
    waiting = served.add(SEA, max_new_tokens=4, keep=True)
    waiting.cancel()
    assert waiting.context is None


def test_a_conversation_goes_on_from_a_file(tmp_path):
    served, file = engine(), tmp_path / "talk.safetensors"
    *_, context = talk(served, 3)
    served.save(context, file, origin={"of": "a test"})
    other = engine()
    loaded = other.read(file)
    assert (loaded.tokens, loaded.answered) == (context.tokens, True)
    asked = prompt(9, 4)
    kept = other.add(loaded, asked, max_new_tokens=4, keep=True)
    assert kept.result().tokens == served.add(context, asked, max_new_tokens=4).result().tokens
    assert kept.context.length == context.length + 4 + 3


@pytest.mark.wrong_arguments
def test_what_cannot_be_kept_or_asked_is_refused(tmp_path):
    served, file = engine(), tmp_path / "context.safetensors"
    handle = served.add(prompt(1, 30), max_new_tokens=2, keep=True)
    handle.result()
    with pytest.raises(ValueError, match="an answer has left holds no logits"):
        served.add(handle.context)
    with pytest.raises(ValueError, match="keep must be True or False, got 1"):
        served.add(prompt(1, 30), keep=1)
    served.save(served.read(prompt(3, 50)), file)
    with pytest.raises(ValueError, match="keep needs the prompt's tokens"):
        served.add(file, [1], keep=True)
    with pytest.raises(ValueError, match="compact needs the tokens of a context"):
        served.compact(served.read(file))


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            method, id=named(method), marks=[pytest.mark.exhaustive] * (named(method) not in ("OrbitKV", "SnapKV"))
        )
        for method in every_method(ckv.Budget(ratio=0.4))
    ],
)
def test_every_method_goes_on_within_its_slots(method):
    served = ckv.Engine(taught(), method=method, slots=1, max_tokens=200, reserve=48, keep_short=True)
    results, _, context = talk(served, 12, first=8, each=9)
    assert all(np.isfinite(result.stats.tpot_s) and len(result.tokens[0]) == 4 for result in results)
    rows, _ = served.rows(context)
    if method.schedule.kind == "interval" and method.forgets:
        assert rows < 0.4 * context.length + method.schedule.interval + method.protected.fewest
        assert all(result.stats.cached_tokens[0] for result in results[1:])
