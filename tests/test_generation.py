"""`generate` with the demo model and with a tiny one: questions, streaming, stop strings, sampling, what is refused."""

import dataclasses
import functools
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.generation.batch import bucket
from clusterkv_jax.runtime.prng import spread
from clusterkv_jax.sampling import filtered, sample
from tests.support.tiny import extend, prefill, prompt, tiny

NEEDLE = "One of the special magic numbers for amber-lantern is: 4821057."
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "\nWhat is the special magic number for amber-lantern mentioned in the provided text?"


@functools.cache
def demo() -> ckv.Model:
    return ckv.load("demo")


def text(needle=NEEDLE, sentences=5):
    intro = "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you"
    return f"{intro} about the numbers afterwards.\n{' '.join([FILLER] * sentences)} {needle} {' '.join([FILLER] * 4)}"


def answers(questions=None, **options):
    questions = questions or [QUESTION]
    options = {"method": ckv.CentroidKV(ckv.Budget(ratio=0.75)), "max_new_tokens": 24, **options}
    return ckv.generate(demo(), [text()] * len(questions), questions=questions, **options)


def test_rows_that_move_together_need_no_positions_for_what_follows():
    model, window = tiny(), ckv.StreamingLLM(ckv.Budget(tokens=16), 4, rerotate=True)
    longer = dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=1024))
    asked = {"method": window, "max_new_tokens": 300, "questions": [prompt(2, 5)]}
    far = ckv.generate(model, [prompt(1, 40)], **asked)
    assert far.tokens == ckv.generate(longer, [prompt(1, 40)], **asked).tokens
    assert far.stats.new_tokens == [300]
    for kept in (ckv.Budget(tokens=300), ckv.Budget(ratio=0.5)):  # would hold rows beyond the model's positions
        with pytest.raises(ValueError, match="exceed the model's 256 positions"):
            ckv.generate(model, [prompt(1, 40)], **asked | {"method": dataclasses.replace(window, budget=kept)})
    with pytest.raises(ValueError, match="Prompt 0 of 257 tokens"):
        ckv.generate(model, [prompt(1, 257)], **asked)
    with pytest.raises(ValueError, match="exceed the model's 256 positions"):
        ckv.generate(model, [prompt(1, 40)], **asked | {"method": dataclasses.replace(window, rerotate=False)})


def test_a_compressed_text_is_answered_from_and_streamed():
    pieces, states = [], []
    result = answers(
        on_text=lambda row, piece: pieces.append((row, piece)), progress=lambda *state: states.append(state)
    )
    assert "4821057" in result.texts[0]
    assert "".join(piece for _, piece in pieces) == result.texts[0]
    assert {row for row, _ in pieces} == {0}
    assert states[0] == ("prefill", 1, 6)
    assert ("prefill", 6, 6) in states
    assert states[-1] == ("decode", 24, 24)
    stats = result.stats
    assert {rows for layer in stats.kept_rows for head in layer for rows in head} == {
        int(0.75 * stats.prompt_tokens[0])
    }
    assert stats.cache_bytes < stats.full_cache_bytes
    assert stats.ttft_s > 0 < stats.tpot_s
    assert stats.new_tokens == [len(result.tokens[0])]


def test_many_questions_share_one_reading_of_the_text():
    prefix = "\nThe special magic number for amber-lantern mentioned in the provided text is"
    together = answers([QUESTION, prefix])
    assert len(together.stats.kept_rows[0]) == 1
    assert together.texts[0] == answers([QUESTION]).texts[0]
    assert together.texts[1].strip().startswith("4821057")


def test_a_stop_string_ends_text_and_tokens():
    free = answers()
    stopped = answers(stop=["for amber", "never said"])
    assert stopped.texts[0] == free.texts[0].split("for amber")[0]
    assert stopped.tokens[0] == free.tokens[0][: len(stopped.tokens[0])]
    assert len(stopped.tokens[0]) < len(free.tokens[0])
    assert "for amber" in demo().tokenizer.decode(stopped.tokens[0])


def test_a_batch_of_unequal_texts_is_the_texts_alone():
    other = text("One of the special magic numbers for quiet-harbor is: 1170634.", sentences=3)
    question = QUESTION.replace("amber-lantern", "quiet-harbor")
    method = ckv.CentroidKV(ckv.Budget(ratio=0.75))
    both = ckv.generate(
        demo(), [text(), other], questions=[QUESTION, question], method=method, max_new_tokens=24, prefill_chunk=64
    )
    assert both.texts[0] == answers().texts[0]
    assert "1170634" in both.texts[1]


def test_a_question_that_makes_clustering_due_is_clustered():
    method = ckv.CentroidKV(ckv.Budget(tokens=24), sinks=2, recent=4, chunk=16, interval=8)
    context, question = prompt(1, 48), prompt(2, 40)
    result = ckv.generate(tiny(), [context], questions=[question], method=method, max_new_tokens=4)
    cache, _ = prefill(method, context, max_new_tokens=4, reserve=44, step_tokens=40)
    cache, logits = extend(method, cache, [question])
    assert int(cache.layers[0].length.max()) == 24
    expected = []
    for _ in range(4):
        expected.append(int(jnp.argmax(logits[0])))
        cache, logits = extend(method, cache, [expected[-1:]])
    assert result.tokens[0] == expected


def test_sampling_is_reproducible_and_in_segments_as_in_one():
    options = {"sampling": ckv.Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01), "max_new_tokens": 40}
    first, again, other = (ckv.generate(tiny(), [prompt(1, 20)], seed=s, **options).tokens for s in (1, 1, 2))
    assert first == again != other
    shorter = ckv.generate(tiny(), [prompt(1, 20)], seed=1, **(options | {"max_new_tokens": 7})).tokens
    assert first[0][:7] == shorter[0]


def test_tokens_are_the_same_whether_the_host_watches_or_runs_ahead():
    options = {"sampling": ckv.Sampling(temperature=1.0), "max_new_tokens": 200}
    first, second = ckv.generate(tiny(), [prompt(1, 20), prompt(2, 30)], **options).tokens
    end = next(token for i, token in enumerate(first) if i > 40 and token not in first[:i])
    model = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, eos_ids=(end,)))
    ahead = ckv.generate(model, [prompt(1, 20), prompt(2, 30)], **options)
    watched = ckv.generate(model, [prompt(1, 20), prompt(2, 30)], progress=lambda *state: None, **options)
    assert ahead.tokens == watched.tokens
    assert ahead.tokens[0] == first[: first.index(end) + 1]
    assert ahead.tokens[1] == (second[: second.index(end) + 1] if end in second else second)


@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"top_p": 1}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0.0}])
def test_what_other_servers_call_off_is_off(off):
    assert ckv.Sampling(temperature=0.7, **off) == ckv.Sampling(temperature=0.7)


def test_filters_have_no_effect_at_temperature_0():
    assert ckv.Sampling(top_k=50, top_p=0.9, min_p=0.1) == ckv.Sampling()


def test_a_draw_depends_on_its_seed_and_number_alone():
    """Not on the place in a batch or on neighbours; and equal prompts under one seed differ."""
    options = {"sampling": ckv.Sampling(temperature=1.0), "max_new_tokens": 8}
    one, other = prompt(1, 20), prompt(2, 30)
    alone = {seed: ckv.generate(tiny(), [one], seed=seed, **options).tokens[0] for seed in (3, 4, 5)}
    assert ckv.generate(tiny(), [one] * 3, seed=3, **options).tokens == [alone[3], alone[4], alone[5]]
    assert ckv.generate(tiny(), [other, one, one], seed=[9, 5, 3], **options).tokens[1:] == [alone[5], alone[3]]
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    assert len({*spread(2**32 - 1, 2)}) == 2


def test_filters_keep_what_they_say():
    probs = np.asarray([[0.4, 0.3, 0.15, 0.1, 0.05]])
    logits = jnp.log(jnp.asarray(probs, jnp.float32))

    def kept(**fields):
        return np.flatnonzero(np.isfinite(filtered(logits, ckv.Sampling(temperature=1.0, **fields))[0])).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.69) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(top_p=1e-6) == [0]
    assert kept(min_p=0.3) == [0, 1, 2]
    assert kept(top_k=4, top_p=0.99, min_p=0.5) == [0, 1]
    assert kept(min_p=1.0) == [0]


def test_draws_follow_the_probabilities():
    probs = np.asarray([0.5, 0.3, 0.2])
    logits = jnp.tile(jnp.log(jnp.asarray(probs, jnp.float32)), (4000, 1))
    draws = np.asarray(sample(logits, ckv.Sampling(temperature=1.0), jax.random.key(0), 0))
    np.testing.assert_allclose(np.bincount(draws, minlength=3) / 4000, probs, atol=0.03)
    cold = np.asarray(sample(logits, ckv.Sampling(temperature=0.25), jax.random.key(0), 0))
    assert (cold == 0).mean() > 0.8
    assert (np.asarray(sample(logits, ckv.Sampling(), jax.random.key(0), 0)) == 0).all()


@pytest.mark.parametrize(("n", "size"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 1280), (4097, 5120)])
def test_buckets(n, size):
    assert bucket(n, 64) == size
    assert all(n <= bucket(n, 64) < max(1.25 * n, n + 64) for n in range(1, 9000, 7))


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ckv.generate(tiny(), []), "at least one prompt"),
        (lambda: ckv.generate(tiny(), [[]]), "prompt 0 is empty"),
        (lambda: ckv.generate(demo(), ["  \n"]), "prompt 0 is empty"),
        (lambda: ckv.generate(demo(), {"text": 1}), "must be a list"),
        (lambda: ckv.generate(tiny(), "text"), "has no tokenizer"),
        (lambda: ckv.generate(tiny(), ["text"]), "has no tokenizer"),
        (lambda: ckv.generate(tiny(), [[1.5]]), "list of whole numbers"),
        (lambda: ckv.generate(tiny(), [[1]], method=ckv.Full), "must be objects such as Full"),
        (lambda: ckv.generate(tiny(), [[1, 61]]), "token id 61; allowed are 0 to 60"),
        (lambda: ckv.generate(tiny(), [[-1]]), "token id -1"),
        (lambda: ckv.generate(tiny(), [prompt(1, 200)], max_new_tokens=57), "exceed the model's 256 positions"),
        (lambda: ckv.generate(tiny(), [[1]], max_new_tokens=0), "max_new_tokens must be a whole number"),
        (lambda: ckv.generate(tiny(), [[1]], prefill_chunk=0), "prefill_chunk must be a whole number"),
        (lambda: ckv.generate(tiny(), [[1]], questions=[[1], [2]]), "got 2 for 1 prompts"),
        (lambda: ckv.generate(tiny(), [[1]], questions=[[]]), "question 0 is empty"),
        (lambda: ckv.generate(tiny(), [[1]], stop=["x"]), "no tokenizer"),
        (lambda: ckv.generate(demo(), [text()], stop=[""]), "not empty"),
        (
            lambda: ckv.generate(tiny(), [prompt(1, 100)], method=ckv.CentroidKV(ckv.Budget(ratio=0.5))),
            r"a prompt of 100 tokens has a budget of 50 rows, which must be more than sinks \+ recent",
        ),
        (lambda: ckv.Sampling(temperature=-1), "temperature must be a number of at least 0, got -1"),
        (lambda: ckv.Sampling(top_k=-2), "top_k must be a whole number of at least 1, or None, 0 or -1 .*, got -2"),
        (lambda: ckv.Sampling(top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (lambda: ckv.Sampling(min_p=-0.1), "min_p must be between 0 and 1, got -0.1"),
        (lambda: ckv.Sampling(temperature=1e-40), "must be 0, which is greedy, or at least 1e-30, got 1e-40"),
        (lambda: ckv.generate("demo", [text()]), "model must be one that load or as_model returns, got 'demo'"),
        (lambda: ckv.Engine("demo"), "model must be one that load or as_model returns, got 'demo'"),
        (lambda: ckv.generate(tiny(), 5), "prompts must be a list of texts or of token ids, got 5"),
        (lambda: ckv.generate(tiny(), [None]), "prompt 0 must be a text or a list of whole numbers, got None"),
        (lambda: ckv.generate(tiny(), [[1], 5]), "prompt 1 must be a text or a list of whole numbers, got 5"),
        (lambda: ckv.generate(tiny(), [b"hello"]), "prompt 0 must be a text or a list of whole numbers, got b'hello'"),
        (lambda: ckv.generate(tiny(), [[True, 1]]), "list of whole numbers, got True in it"),
        (lambda: ckv.generate(tiny(), [jnp.ones(3)]), "list of whole numbers, got .* in it"),
        (lambda: ckv.generate(tiny(), [[1]], questions=[None]), "question 0 must be a text or a list of whole numbers"),
        (lambda: ckv.generate(tiny(), [[1]], stop=5), "stop must be a list of texts"),
        (lambda: ckv.generate(demo(), [text()], stop=iter(["x"])), "stop must be a list of texts"),
        (lambda: ckv.generate(tiny(), [[1]], seed=1.5), "seed must be a whole number from 0 to 4294967295, got 1.5"),
        (lambda: ckv.generate(tiny(), [[1]], seed=2**32), "4294967295, got 4294967296"),
        (lambda: ckv.generate(tiny(), [[1]], seed=[1, 2]), "Seeds must be one per prompt, got 2 for 1 prompts"),
        (lambda: ckv.generate(tiny(), [[1]], seed=[-1]), "seed 0 must be a whole number from 0 to .*, got -1"),
        (lambda: ckv.generate(tiny(eos=(2, 99)), [[1]]), "ends a text with token id 99; allowed are 0 to 60"),
        (lambda: ckv.load(5), "name must be 'demo', a folder or a hub id 'owner/name', got 5"),
        (lambda: ckv.load("demo", mesh="x"), "mesh must be a jax.sharding.Mesh or None, got 'x'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(make, said):
    with pytest.raises(ValueError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_ids_may_be_arrays_of_any_kind():
    ids, options = [3, 1, 4], {"max_new_tokens": 2}
    expected = ckv.generate(tiny(), [ids], **options).tokens
    for prompts in ([jnp.asarray(ids)], jnp.asarray([ids]), [np.asarray(ids)], (tuple(ids),)):
        assert ckv.generate(tiny(), prompts, **options).tokens == expected


# --- numbers that are none


def broken(*path, wrong=np.nan):
    """The tiny model with one wrong number in the parameter of this name."""
    params = jax.tree.map(lambda x: x, tiny().params)
    *folders, name, at = path
    place = functools.reduce(lambda tree, key: tree[key], folders, params)
    place[name] = place[name].at[at].set(wrong)
    return dataclasses.replace(tiny(), params=params)


BAD_LAYER = ("layers", 1, "mlp", "down", 0)
SEEN = [5, 6, 8, 9] * 10


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (BAD_LAYER, {}, r"Prompt 0: the model's logits after 40 tokens are not finite .* from layer 1 \(of 0 to 1\)"),
        (BAD_LAYER, {"sampling": ckv.Sampling(temperature=1.0, top_p=0.9)}, "layer 1"),
        (BAD_LAYER, {"prefill_chunk": 16, "method": ckv.SnapKV(ckv.Budget(tokens=16), window=4)}, "layer 1"),
        (("layers", 0, "attention", "k", 0), {}, "layer 0"),
        (("lm_head", 7), {}, "the output head"),
        (("embed", 7), {"questions": [[1, 7], [1, 2]]}, "Prompt 0: .* after 42 tokens .* the embeddings"),
        (("embed", 7), {"questions": [[1, 2], [1, 7]]}, "Prompt 1: .* after 42 tokens .* the embeddings"),
    ],
)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_name_the_first_layer(path, wrong, options, said):
    prompts = [SEEN] * len(options.get("questions", [0]))
    with pytest.raises(ValueError, match=said) as error:
        ckv.generate(broken(*path, wrong=wrong), prompts, max_new_tokens=4, **options)
    assert "\n" not in str(error.value)


def test_a_step_whose_logits_are_not_finite_ends_the_generation():
    """The second sequence comes to a token whose embedding is no number (and that pads no text)."""
    prompts, options = [[5, 6, 8, 9], SEEN], {"max_new_tokens": 40}
    first, tokens = ckv.generate(tiny(), prompts, **options).tokens
    place, token = next((i, t) for i, t in enumerate(tokens[:-1]) if t not in {0, *SEEN, *first, *tokens[:i]})
    with pytest.raises(ValueError, match=f"Prompt 1: .* after {len(SEEN) + place + 1} tokens .* from the embeddings"):
        ckv.generate(broken("embed", token), prompts, **options)


def test_numbers_that_compression_breaks_are_laid_at_its_door(monkeypatch):
    monkeypatch.setattr(import_module("clusterkv_jax.generation.stages"), "_first_not_finite", lambda *_: None)
    with pytest.raises(ValueError, match=r"come with what Full\(\) keeps; without compression all are"):
        ckv.generate(broken(*BAD_LAYER), [SEEN], max_new_tokens=4)
