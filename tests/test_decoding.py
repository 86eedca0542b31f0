"""Prefill, decode step and loop: equal to the plain forward pass, within budget, one program, one conditional."""

import dataclasses
import re
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import decoding
from clusterkv_jax.blocks.linear import tokens_at_once
from clusterkv_jax.cache.layers import groups, occupancy
from clusterkv_jax.cache.pages import from_pages, page_view
from clusterkv_jax.decoding import DecodeState, decode_loop, prefilling
from clusterkv_jax.methods.recompression import due, steps_until_due
from clusterkv_jax.methods.request import LayerPlan
from clusterkv_jax.models import decoder, parameters
from tests.support.methods import every_method, named
from tests.support.tiny import EXTEND, STEP, VOCAB, padded, prompt, taught, tiny
from tests.support.tiny import prefill as tiny_prefill

# One interval, step count and set of prompts, so that tests share their programs. The interval is short enough to
# cluster several times and too long for a question of 7 tokens to end it.
INTERVAL = 8
CENTROID = ckv.CentroidKV(ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16, interval=INTERVAL)
CHELSEA = ckv.Chelsea(
    ckv.Budget(ratio=0.5, base="prompt"), sinks=2, recent=4, chunk=16, interval=INTERVAL, outlier_heads=((1, 0),)
)
STEPS = 3 * INTERVAL
HALF = ckv.Budget(ratio=0.5)
SNAPKV = ckv.SnapKV(HALF, window=4, kernel=3, decode_interval=INTERVAL)
METHODS = [ckv.Full(), CHELSEA]  # tests/sweeps and tests/engine have every method
KINDS = ("GravityKV", "SnapKV", "AdaKV", "KVzap", "H2O")
PROMPTS = [prompt(1, 48), prompt(2, 33), prompt(3, 40)]


def prefill(method, *prompts, model=None, **options):
    options = {"max_new_tokens": STEPS, "step_tokens": 8, "width": 48, **options}
    return tiny_prefill(method, *prompts, model=model or taught(), **options)


FORWARD = jax.jit(decoder.forward, static_argnums=1)


def step(method, cache, token):
    return STEP(taught().params, taught().config, method, cache, jnp.asarray(token))


def forward(tokens):
    """Logits of every position without any cache; one shape for all prompts, causality ignores the padding."""
    return np.asarray(FORWARD(tiny().params, tiny().config, padded(tokens, width=64)[0]))[0]


def assert_close(result, expected, tolerance=1e-5):
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(result - expected) <= tolerance * np.linalg.norm(expected)


@contextmanager
def compilations():
    """Names of the programs compiled inside the block."""
    names = []

    def listen(event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_prefill_in_chunks_is_prefill_at_once_with_the_logits_of_the_full_prompt(method):
    long, short = prompt(1, 48), prompt(2, 29)
    cache, logits = prefill(method, long, short)
    parts, chunked = prefill(method, long, short, prefill_chunk=10)  # of 48 tokens: the last chunk overlaps
    for result in (logits, chunked):
        assert result.shape == (2, VOCAB)
        assert_close(result[0], forward(long)[47])
        assert_close(result[1], forward(short)[28])
    for whole, part in zip(jax.tree.leaves(cache), jax.tree.leaves(parts), strict=True):
        assert_close(part, whole)


def test_only_a_long_prompt_is_taken_through_the_mlp_in_parts():
    """The MLP's inner activations, 100 columns here, are those of at most `tokens_at_once` tokens of a batch."""
    model, batch = tiny(), 2
    config = dataclasses.replace(model.config, intermediate_size=100)
    weights = jax.eval_shape(lambda: parameters.init(jax.random.key(0), config))["layers"][0]

    def inner(tokens):
        hidden = jax.ShapeDtypeStruct((batch, tokens, config.hidden_size), jnp.float32)
        lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
        lowered = prefilling._read_layer.lower(weights, config, frozenset(), None, hidden, lengths, None)
        return {int(n) for n in re.findall(rf"tensor<{batch}x(\d+)x100xf32>", lowered.as_text())}

    most = tokens_at_once() // batch
    assert inner(most) == {most}
    assert inner(most + 64) == {most // 2 + 32}


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "known"),
    [(PROMPTS[:1], STEPS, True), ([PROMPTS[0]] * 2, STEPS, True), (PROMPTS[:2], STEPS, False), (PROMPTS[:1], 1, False)],
    ids=["one prompt", "prompts alike", "unequal prompts", "a smaller budget than reserved"],
)
def test_plans_are_exact_where_the_host_knows_every_round(prompts, new_tokens, known):
    """Then a GPU is not asked whether a prompt has met its budget, which is that of the plan."""
    model, plans = tiny(), []

    def run(program, *args):
        plans.extend(group for arg in args if isinstance(arg, LayerPlan) for group in arg.groups)
        return program(*args)

    tokens, lengths = padded(*prompts, width=48)
    method = dataclasses.replace(CENTROID, budget=ckv.Budget(ratio=0.5, base="prompt+new"))
    counts = {"max_new_tokens": new_tokens, "reserve": STEPS}
    cache, _ = decoding.prefill(model.params, model.config, method, tokens, lengths, **counts, call=run)
    assert [group.exact for group in plans] == [known] * model.config.num_layers
    if known:
        assert {rows for layer in occupancy(cache) for heads in layer for rows in heads} == {plans[0].most_rows}


def test_decode_steps_of_the_full_cache_are_the_forward_pass():
    long, short, new = prompt(1, 40), prompt(2, 25), prompt(3, 6)
    cache, _ = prefill(ckv.Full(), long, short)
    expected = forward(long + new), forward(short + new)
    for i, token in enumerate(new):
        cache, logits = step(ckv.Full(), cache, [token, token])
        assert_close(logits[0], expected[0][40 + i])
        assert_close(logits[1], expected[1][25 + i])
    assert cache.position.tolist() == [46, 31]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_question_in_one_piece_is_its_tokens_one_by_one(method):
    question = prompt(4, 7)
    cache, _ = prefill(method, prompt(1, 40), prompt(2, 30))
    tokens = jnp.asarray([[*question, 0], question[:3] + [5] * 5])
    model = tiny()
    once, logits = EXTEND(model.params, model.config, method, cache, tokens, jnp.asarray([7, 3]))
    single = cache
    for i, token in enumerate(question):
        single, expected = step(method, single, [token, token])
        if i == 2:
            assert_close(logits[1], expected[1])
    assert_close(logits[0], expected[0])
    assert once.position.tolist() == [47, 33]
    assert [rows[0] for rows in occupancy(once)] == [rows[0] for rows in occupancy(single)]


@pytest.mark.parametrize("method", [CENTROID, CHELSEA], ids=lambda m: type(m).__name__)
def test_the_budget_holds_after_every_step(method):
    cache, _ = prefill(method, prompt(1, 48), prompt(2, 36))
    shapes = [x.shape for x in jax.tree.leaves(cache)]
    full = {(1, 0)} if method is CHELSEA else set()
    outliers = len(full)
    for i in range(STEPS):
        cache, _ = step(method, cache, [i, i + 1])
        assert [x.shape for x in jax.tree.leaves(cache)] == shapes
        for layer, rows in enumerate(occupancy(cache)):
            for b, n in enumerate((48, 36)):
                budget = (n // 2 * 4 - outliers * n) // (4 - outliers)
                for head, count in enumerate(rows[b]):
                    if (layer, head) in full:
                        assert count == n + i + 1
                    else:
                        assert budget <= count < budget + INTERVAL
                        # Clustered when it reached B + interval, back to exactly B.
                        assert count == budget + (i + 1) % INTERVAL
        for layer in cache.layers:
            paged = isinstance(layer, ckv.PagedHeads)
            for group in layer.groups if paged else groups(layer):
                assert (np.asarray(group.degree).sum(-1) == np.asarray(cache.position)[:, None]).all()
            for group in (page_view(layer),) if paged else groups(layer):
                degree, length = np.asarray(group.degree), np.asarray(group.length)
                assert ((degree > 0) == (np.arange(group.capacity) < length[..., None])).all()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_row_in_a_batch_is_the_row_alone(method):
    together = ckv.generate(tiny(), PROMPTS, method=method, max_new_tokens=STEPS)
    for i, text in list(enumerate(PROMPTS))[1:]:
        alone = ckv.generate(tiny(), [text], method=method, max_new_tokens=STEPS)
        assert alone.tokens[0] == together.tokens[i]


@pytest.mark.parametrize("method", [CENTROID, dataclasses.replace(CHELSEA, outlier_heads=())])
def test_a_ratio_of_one_is_bit_for_bit_the_full_cache(method):
    method = dataclasses.replace(method, budget=ckv.Budget(ratio=1.0))
    full, _ = prefill(ckv.Full(), prompt(1, 48), prompt(2, 33))
    cache, _ = prefill(method, prompt(1, 48), prompt(2, 33))
    for token in prompt(5, 10):
        full, expected = step(ckv.Full(), full, [token, token])
        cache, logits = step(method, cache, [token, token])
        np.testing.assert_array_equal(logits, expected)


# One of each way to hold rows; tests/sweeps has every method.
@pytest.mark.parametrize("method", [x for x in every_method(HALF) if named(x) in KINDS], ids=named)
def test_a_method_keeps_its_budget_at_every_step(method):
    assert_budget_at_every_step(method)


def assert_budget_at_every_step(method):
    cache, _ = prefill(method, prompt(1, 48), prompt(2, 36))
    other, _ = prefill(method, prompt(3, 45), prompt(2, 36))  # the second row must not notice
    shapes = [x.shape for x in jax.tree.leaves(cache)]
    every = 4 if due(method, cache) is not None else 1
    for i in range(9):
        cache, logits = step(method, cache, [i, i + 1])
        other, expected = step(method, other, [i + 2, i + 1])
        np.testing.assert_array_equal(logits[1], expected[1])
        assert [x.shape for x in jax.tree.leaves(cache)] == shapes
        assert steps_until_due(method, cache) == (None if every == 1 else every - (i + 1) % every)
        for number, (layer, rows) in enumerate(zip(cache.layers, occupancy(cache), strict=True)):
            pyramid = (5 / 3, 1 / 3)[number] if isinstance(method, ckv.PyramidKV) else 1
            if method.storage == "pages":
                rows = [[sum(row) // 2] * 2 for row in rows]
            assert rows == [[round(pyramid * n / 2) + (i + 1) % every] * 2 for n in (48, 36)]
            layer = from_pages(layer, layer.degree[0].size) if isinstance(layer, ckv.PagedHeads) else layer
            degree, length = np.asarray(layer.degree), np.asarray(layer.length)
            assert ((degree > 0) == (np.arange(layer.capacity) < length[..., None])).all()
            if isinstance(method, ckv.GravityKV | ckv.OrbitKV):
                assert (degree.sum(-1) == np.asarray(cache.position)[:, None]).all()


@pytest.mark.parametrize(
    "method", [ckv.StreamingLLM(HALF), ckv.StreamingLLM(HALF, rerotate=True), ckv.H2O(HALF), ckv.CaM(HALF)], ids=named
)
def test_dropping_at_every_token_does_not_depend_on_how_many_come_at_once(method):
    question = prompt(4, 7)
    cache, _ = prefill(method, prompt(1, 40), prompt(2, 30))
    tokens = jnp.asarray([[*question, 0], question[:3] + [5] * 5])
    once, logits = EXTEND(tiny().params, tiny().config, method, cache, tokens, jnp.asarray([7, 3]))
    for i, token in enumerate(question):
        cache, expected = step(method, cache, [token, token])
        if i == 2:
            assert_close(logits[1], expected[1])
    assert_close(logits[0], expected[0])
    for whole, part in zip(jax.tree.leaves(once.layers), jax.tree.leaves(cache.layers), strict=True):
        assert_close(whole[0], part[0])


def loop_arguments(method, limit, model=None):
    model = model or taught()
    cache, _ = prefill(method, prompt(1, 48), prompt(2, 33), model=model)
    return (
        (model.params, model.config, method, DecodeState(cache, jnp.asarray([1, 2]), jnp.asarray([False, False]))),
        (jax.random.key(0), jnp.int32(1), jnp.int32(limit)),
        {"sampling": ckv.Sampling(), "eos_ids": model.config.eos_ids, "steps": STEPS},
    )


def test_the_loop_is_its_steps_and_one_program_however_many():
    first, second, static = loop_arguments(CENTROID, 3)
    with compilations() as compiled:
        _, output, count = decode_loop(*first, *second, **static)
    assert len([name for name in compiled if "decode_loop" in name]) <= 1
    first, second, static = loop_arguments(CENTROID, STEPS)
    with compilations() as compiled:
        _, more, _ = decode_loop(*first, *second, **static)
    assert compiled == []
    assert int(count) == 3
    output, more = np.asarray(output), np.asarray(more)
    np.testing.assert_array_equal(output[:, :3], more[:, :3])
    assert (output[:, 3:] == -1).all()
    cache, token = loop_arguments(CENTROID, STEPS)[0][3].cache, jnp.asarray([1, 2])
    for i in range(STEPS):
        cache, logits = step(CENTROID, cache, token)
        token = np.argmax(logits, -1)
        np.testing.assert_array_equal(token, more[:, i])


def test_a_second_prompt_of_the_bucket_compiles_nothing():
    ckv.generate(tiny(), PROMPTS, method=CENTROID, max_new_tokens=9)
    with compilations() as compiled:
        ckv.generate(tiny(), [prompt(3, 35), prompt(4, 64), prompt(5, 50)], method=CENTROID, max_new_tokens=40)
    assert compiled == []


@pytest.mark.parametrize(
    ("method", "expected"), [(ckv.Full(), 0), (CENTROID, 1), (CHELSEA, 1), (SNAPKV, 1), (ckv.H2O(HALF), 0)]
)
def test_the_loop_holds_exactly_one_conditional_for_all_layers(method, expected):
    first, second, static = loop_arguments(method, 3)
    lowered = decode_loop.lower(*first, *second, **static)
    assert len(re.findall(r"stablehlo\.(?:case|if)\b", lowered.as_text())) == expected
    assert len(re.findall(r"\bconditional\(", lowered.compile().as_text())) == expected


@pytest.mark.parametrize("method", [ckv.Full(), CENTROID])
def test_layers_that_are_alike_are_lowered_once(method):
    def products(layers):
        first, second, static = loop_arguments(method, 3, tiny(layers=layers))
        return decode_loop.lower(*first, *second, **static).as_text().count("stablehlo.dot_general")

    assert products(2) == products(6) > 5


def test_a_row_that_has_ended_writes_nothing_more():
    free = ckv.generate(tiny(), PROMPTS, method=CENTROID, max_new_tokens=STEPS)
    end = free.tokens[0][5]
    result = ckv.generate(tiny(eos=(end,)), PROMPTS, method=CENTROID, max_new_tokens=STEPS)
    for stopped, whole in zip(result.tokens, free.tokens, strict=True):
        cut = whole.index(end) + 1 if end in whole else len(whole)
        assert stopped == whole[:cut]
    assert len(result.tokens[0]) <= 6


def test_the_lengths_stay_the_callers():
    tokens, lengths = padded(prompt(1, 48), prompt(2, 33))
    cache, _ = ckv.prefill(
        tiny().params, tiny().config, ckv.Full(), tokens, lengths, max_new_tokens=STEPS, step_tokens=8
    )
    donating = jax.jit(ckv.decode_step, static_argnums=(1, 2), donate_argnums=3)
    donating(tiny().params, tiny().config, ckv.Full(), cache, jnp.asarray([1, 2]))
    assert lengths.tolist() == [48, 33]


def test_a_token_without_a_slot_shows_as_nan():
    cache, _ = prefill(ckv.Full(), prompt(1, 48), prompt(2, 48), max_new_tokens=1)
    cache, logits = step(ckv.Full(), cache, [3, 3])
    assert bool(jnp.isfinite(logits).all())
    _, logits = step(ckv.Full(), cache, [3, 3])
    assert bool(jnp.isnan(logits).all())


def test_prefill_names_what_does_not_fit():
    with pytest.raises(ValueError, match="257 tokens exceeds the model's 256 positions"):
        ckv.prefill(tiny().params, tiny().config, ckv.Full(), *padded(prompt(1, 257), width=257))
    with pytest.raises(ValueError, match=r"between 1 and 48, got \[0\]"):
        ckv.prefill(tiny().params, tiny().config, ckv.Full(), padded(prompt(1, 3), width=48)[0], jnp.asarray([0]))


def test_prefill_and_steps_can_be_jitted_whole():
    model, method = tiny(), CENTROID

    @jax.jit
    def answer(params, tokens, lengths):
        cache, logits = ckv.prefill(params, model.config, method, tokens, lengths, max_new_tokens=4)
        return ckv.decode_step(params, model.config, method, cache, jnp.argmax(logits, -1))[1]

    logits = answer(model.params, *padded(prompt(1, 48), prompt(2, 33)))
    cache, expected = prefill(method, prompt(1, 48), prompt(2, 33))
    _, expected = step(method, cache, jnp.argmax(expected, -1))
    assert_close(logits, expected)


# --- what cannot be


def short(tokens, lengths=(4,), **options):
    return ckv.prefill(tiny().params, tiny().config, ckv.Full(), tokens, jnp.asarray(lengths), **options)


def next_of(token):
    return ckv.decode_step(tiny().params, tiny().config, ckv.Full(), short(jnp.asarray([[1, 2, 3, 4]]))[0], token)


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: short(jnp.asarray([[1, 2, VOCAB, 4]])), r"id 61 \(sequence 0, token 2\); allowed are 0 to 60"),
        (lambda: short(np.asarray([[1, -1, 3, 4]])), r"tokens hold id -1 \(sequence 0, token 1\)"),
        (lambda: short(jnp.asarray([[1.0, 2, 3, 4]])), "tokens must be an array of whole numbers, got float32"),
        (lambda: short(jnp.asarray([1, 2, 3, 4])), r"tokens must be an array \[B,N\], got shape \(4,\)"),
        (lambda: short(jnp.asarray([[1, 2, 3, 4]]), (4.0,)), "lengths must be whole numbers, got float32"),
        (lambda: short(jnp.asarray([[1, 2, 3, 4]]), max_new_tokens=-1), "max_new_tokens must be .* at least 0, got -1"),
        (lambda: short(jnp.asarray([[1, 2, 3, 4]]), step_tokens=0), "step_tokens must be .* at least 1, got 0"),
        (lambda: next_of(jnp.asarray([VOCAB])), r"tokens hold id 61 \(sequence 0\); allowed are 0 to 60"),
        (lambda: next_of(jnp.asarray([1, 2])), r"one id for each of 1 sequences, got \(2,\)"),
        (lambda: next_of(jnp.asarray([1.0])), "token must be an array of whole numbers, got float32"),
    ],
)
def test_what_is_impossible_is_named_in_one_sentence(make, said):
    with pytest.raises(ValueError, match=said) as error:
        make()
    assert str(error.value).count(". ") == 0


def test_ids_beyond_a_length_and_traced_ones_are_not_looked_at():
    tokens = jnp.asarray([[1, 2, 3, 999]])
    _, logits = short(tokens, (3,))
    assert bool(jnp.isfinite(logits).all())
    traced = jax.jit(lambda tokens: short(tokens, (3,))[1])(tokens)
    np.testing.assert_allclose(traced, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        ckv.Composed(ckv.Full(), ckv.CentroidKV(ckv.Budget(tokens=40), sinks=2, recent=4, chunk=16)),
        ckv.Chelsea(ckv.Budget(tokens=40), sinks=2, recent=4, chunk=16),
    ],
    ids=["composed", "chelsea"],
)
def test_a_prompt_that_stays_above_its_budget_is_brought_back_while_decoding(method):
    """Though the tokens behind it are fewer than an interval."""
    ids, limit = prompt(3, 140), 40 + 128
    cache, logits = prefill(method, ids, width=140, max_new_tokens=100, step_tokens=1)
    for _ in range(100):
        cache, logits = step(method, cache, jnp.argmax(logits, axis=-1).astype(jnp.int32))
    assert np.isfinite(logits).all()
    assert max(np.max(group.length) for layer in cache.layers for group in groups(layer)) <= limit
