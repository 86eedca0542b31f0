"""What a request asks of its tokens: penalties, biases, fewest tokens, grammars, log probabilities."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.engine import SamplingParams
from clusterkv_jax.runtime import programs
from tests.engine.test_engine import EIGHT, alone, engine
from tests.support.tiny import prompt, tiny

TEXT = prompt(5, 25)


@functools.cache
def logits_after(tokens):
    """The full model's, after the prompt and these tokens."""
    model, text = tiny(), [*TEXT, *tokens]
    padded = jnp.asarray([text + [0] * (64 - len(text))])
    return np.asarray(ckv.prefill(model.params, model.config, ckv.Full(), padded, jnp.asarray([len(text)]))[1][0])


def said(served, params=None, **options):
    """The tokens of a request, and its result."""
    (handle,) = served.submit(served.request(TEXT, params=params, **options))
    result = handle.result()
    return result.tokens[0], result


@pytest.fixture
def served():
    made = engine(method=ckv.Full())
    return made


def penalised(logits, tokens, frequency=0.0, presence=0.0, repetition=1.0, bias=()):
    """The definition, token by token."""
    logits = logits.astype(np.float64).copy()
    for token in {*TEXT, *tokens}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(tokens):
        logits[token] -= frequency * tokens.count(token) + presence
    for token, value in dict(bias).items():
        logits[token] += value
    return logits


@pytest.mark.parametrize(
    "how",
    [
        {"frequency": -2.0, "presence": -2.0},
        {"frequency": 1.5, "presence": 0.5, "bias": ((3, 8.0), (9, -100.0))},
        {"repetition": 1.7},
    ],
)
def test_tokens_are_the_best_by_the_definition(served, how):
    names = {"frequency": "frequency_penalty", "presence": "presence_penalty", "repetition": "repetition_penalty"}
    named = {names[name]: value for name, value in how.items() if name in names}
    params = SamplingParams(max_tokens=8, logprobs=3, logit_bias=dict(how.get("bias", ())), **named)
    tokens, result = said(served, params)
    for place, (token, told) in enumerate(zip(tokens, result.logprobs[0], strict=True)):
        logits = logits_after(tuple(tokens[:place]))
        assert token == np.argmax(penalised(logits, tokens[:place], **how))
        logprobs = logits - np.log(np.sum(np.exp(logits.astype(np.float64))))
        np.testing.assert_allclose(told.logprob, logprobs[token], atol=1e-4)
        assert told.token == token
        assert [number for number, _ in told.top] == np.argsort(-logits, kind="stable")[:3].tolist()
        np.testing.assert_allclose([value for _, value in told.top], np.sort(logprobs)[::-1][:3], atol=1e-4)
    assert tokens != served.add(TEXT, **EIGHT).result().tokens[0]


def test_who_asks_nothing_says_what_it_says_alone():
    served = engine()
    odd = served.add(prompt(3, 30), presence_penalty=2.0, logprobs=0, **EIGHT)
    plain = [served.add(prompt(seed, 20 + seed), seed=seed, **EIGHT) for seed in (4, 5)]
    served.run()
    assert [tuple(handle.result().tokens[0]) for handle in plain] == [alone(4, 24), alone(5, 25)]
    assert plain[0].result().logprobs is None
    assert [len(each.top) for each in odd.result().logprobs[0]] == [0] * 8


def test_nothing_ends_a_text_too_early():
    end = alone(5, 25)[3]
    served = engine(tiny(eos=(end,)))
    free = served.add(TEXT, seed=5, ignore_eos=True, **EIGHT).result()
    assert (tuple(free.tokens[0]), free.finish_reasons) == (alone(5, 25), ["length"])
    late = served.add(TEXT, seed=5, min_tokens=6, **EIGHT).result().tokens[0]
    assert late[:3] == list(alone(5, 25)[:3])
    assert len(late) >= 6
    assert end not in late[:6]
    ended = served.add(TEXT, seed=5, **EIGHT).result()
    assert (ended.tokens[0], ended.finish_reasons) == (list(alone(5, 25)[:4]), ["eos"])


def test_a_grammar_says_what_may_follow(served):
    seen = []

    def after(tokens):
        """Even tokens after the first, which may be any: bits of 32-bit words, as grammars have them."""
        seen.append(tokens)
        return None if not tokens else np.asarray([0x55555555, 0x55555555], np.int32)

    tokens, _ = said(served, SamplingParams(max_tokens=8), allowed_tokens=after)
    assert seen == [tuple(tokens[:count]) for count in range(8)]
    assert all(token % 2 == 0 for token in tokens[1:])
    for place, token in enumerate(tokens[1:], 1):
        logits = logits_after(tuple(tokens[:place]))
        assert token == 2 * np.argmax(logits[::2])


def test_a_grammar_that_fails_ends_its_request_alone(served):
    bad = [served.request(TEXT, allowed_tokens=lambda tokens, mask=mask: mask) for mask in ([1], np.zeros(2, np.int32))]
    handles = [served.submit(request)[0] for request in bad]
    good = served.add(TEXT, **EIGHT)
    with pytest.raises(ValueError, match="must return an array of 32-bit words or None, got"):
        handles[0].result()
    with pytest.raises(ValueError, match="allows no token here"):
        handles[1].result()
    assert len(good.result().tokens[0]) == 8


def test_whatever_is_asked_goes_through_one_more_program(served):
    served.add(TEXT, **EIGHT).result()
    served.add(TEXT, logprobs=1, **EIGHT).result()
    with programs.compilation() as total:
        served.add(TEXT, repetition_penalty=1.2, logit_bias={1: 2.0}, min_tokens=3, **EIGHT)
        served.add(TEXT, presence_penalty=-1, logprobs=20, sampling=ckv.Sampling(temperature=0.7), **EIGHT)
        served.run()
    assert total.programs == 0


def test_a_stream_comes_in_short_calls(served):
    pieces = []
    served.submit(served.request(TEXT, params=SamplingParams(max_tokens=13), stream=True), pieces.append)
    served.run()
    assert [len(piece.token_ids) for piece in pieces] == [1, 4, 4, 4]


@pytest.mark.wrong_arguments
def test_what_cannot_be_asked_is_said_at_once(served):
    for options, message in [
        ({"n": 0}, "SamplingParams n must be a whole number of at least 1"),
        ({"frequency_penalty": 3}, "frequency_penalty must be a number from -2 to 2"),
        ({"presence_penalty": "1"}, "presence_penalty must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.001 to 1,000"),
        ({"logit_bias": {"1": 2}}, "logit_bias must be at most 1024 numbers by token id, or None"),
        ({"logit_bias": {99: 2}}, "logit_bias holds token id 99"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, or None"),
        ({"min_tokens": 65}, "min_tokens must be at most the new tokens, 64, got 65"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"temperature": -1}, "temperature must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            served.request(TEXT, params=SamplingParams(**options))
