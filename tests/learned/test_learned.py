"""Scores as pure functions against the public implementations' outputs, what padding and batches may not change, and
the methods that are such a score.
"""

import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax import learned
from clusterkv_jax.blocks.rope import rotate
from clusterkv_jax.cache.layers import StepInputs
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned import expected
from clusterkv_jax.learned.leverage import leverage
from clusterkv_jax.methods.base import Rows
from clusterkv_jax.methods.driver import step_layer
from clusterkv_jax.methods.families.eviction import best_of_layer
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.models.config import Rope
from tests.support.golden_files import golden
from tests.support.layers import compress as compress_layer
from tests.support.learned_model import CASES, SINKS, close, model
from tests.support.tiny import prompt, tiny

# --- Expected Attention ---

VARIANTS = {"v_e0": (True, 0.0), "v_e2": (True, 1e-2), "nov": (False, 0.0)}


@CASES
def test_expected_attention_is_kvpresss(case):
    outputs, meta = golden(f"expected_attention_case{case}")
    for number, layer in enumerate(model(case).layers):
        score = functools.partial(
            learned.expected_attention, layer.q_before, layer.k, layer.v, model(case).rope, sinks=SINKS
        )
        for covariance, name in ((True, "cov"), (False, "mean")):
            for variant, (value_norm, epsilon) in VARIANTS.items():
                result = score(covariance=covariance, value_norm=value_norm, epsilon=epsilon)[0]
                close(result, outputs[f"score_{name}_{variant}"][number])
        other = meta["score_future"]
        result = score(sinks=other["n_sink"], future=other["n_future_positions"])[0]
        close(result, outputs["score_future"][number])
        with pytest.raises(AssertionError):  # one future position is not their mean
            close(score(sinks=other["n_sink"], future=1)[0], outputs["score_future"][number])


@CASES
@pytest.mark.parametrize(("tag", "ratio"), [("5", 0.5), ("8", 0.2)])
def test_the_method_keeps_what_kvpress_keeps(case, tag, ratio):
    """In a model: queries are turned back, and budgets are those of kvpress."""
    outputs, _ = golden(f"expected_attention_case{case}")
    others, _ = golden(f"tokenscores_case{case}")
    lengths = jnp.asarray([model(case).tokens.shape[1]])
    budget = ckv.Budget(ratio=ratio)
    for method, positions in (
        (ckv.ExpectedAttention(budget), outputs[f"kept_cov_v_e0_{tag}"]),
        (ckv.KeyDiff(budget), others[f"kept_keydiff_{tag}"]),
    ):
        cache, _ = ckv.prefill(model(case).params, model(case).config, method, model(case).tokens, lengths)
        for layer, rows in zip(cache.layers, np.sort(positions), strict=True):
            np.testing.assert_array_equal(layer.positions[0, :, : rows.shape[1]], rows)
            assert (np.asarray(layer.length) == rows.shape[1]).all()


@CASES
@pytest.mark.parametrize(("tag", "ratio"), [("5", 0.5), ("8", 0.2)])
def test_over_heads_it_keeps_what_kvpress_keeps(case, tag, ratio):
    outputs, _ = golden(f"expected_attention_case{case}")
    count = model(case).tokens.shape[1]
    method = ckv.ExpectedAttention(ckv.Budget(ratio=ratio), epsilon=1e-2, scope="layer")
    budget = jnp.asarray([int(count * ratio)])
    for layer, evicted in zip(model(case).layers, outputs[f"evicted_adakv_cov_v_e2_{tag}"], strict=True):
        score = learned.expected_attention(layer.q_before, layer.k, layer.v, model(case).rope, epsilon=1e-2)
        length = jnp.full(score.shape[:2], count)
        stay = best_of_layer(score, length, budget, method.protected, count)
        np.testing.assert_array_equal(~stay[0], evicted.astype(bool))


@pytest.mark.parametrize(
    "rope", [None, Rope(1e4, 8), Rope(1e4, 4), Rope(1e4, 8, interleaved=True), Rope(1e4, 4, interleaved=True)]
)
def test_the_mean_rotation_is_that_of_rotated_vectors(rope):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)
    position = jnp.asarray([5, 90])
    mean = (
        x
        if rope is None
        else jnp.mean(jnp.stack([rotate(x[:, None], position[:, None] + i, rope)[:, 0] for i in range(16)]), axis=0)
    )
    close(expected.turned(x, position, 16, rope), mean, 1e-5)
    back = x[:, :, None] if rope is None else rotate(x[:, None], position[:, None], rope)[:, 0, :, None]
    close(expected.before_rotation(back, position[:, None], rope)[:, :, 0], x, 1e-5)


def test_decoded_queries_count_as_those_of_the_prompt():
    """Scores after decoding are those of one prompt of the same tokens."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, h, 40, 8)), jnp.float32) for h in (4, 2, 2))
    request = RequestShape(np.asarray([25]), 1, 2, reserve=15, rope=Rope(1e4, 8))
    method = ckv.ExpectedAttention(ckv.Budget(tokens=25), sinks=3, future=16, decode_interval=64)
    layer, state, _ = compress_layer(method, [x[:, :, :25] for x in (q, k, v)], np.asarray([25]), request)
    step = jax.jit(functools.partial(step_layer, method))
    for start, stop in ((25, 26), (26, 36), (36, 40)):
        new = (jnp.swapaxes(x[:, :, start:stop], 1, 2) for x in (q, k, v))
        positions = start + ordinals(stop - start, 2)
        tokens = StepInputs(*new, positions, jnp.ones_like(positions, bool), rope=request.rope)
        _, layer, state = step(layer, state, tokens)
    plan = SimpleNamespace(rope=request.rope)
    result = method.score(Rows(layer, jnp.asarray([25]), jnp.asarray([40]), state[0], plan=plan))
    before = expected.before_rotation(q, ordinals(40, 2), request.rope)
    whole = learned.expected_attention(before, k, v, request.rope, sinks=3, future=16)
    close(result[:, :, 3:40], whole[:, :, 3:])


# --- keys, values, outputs ---


@CASES
def test_scores_of_single_layers_are_kvpresss(case):
    outputs, meta = golden(f"tokenscores_case{case}")
    lag, chunk = meta["lagkv"]["lag_size"], meta["compactor"]["chunk_size"]
    for i, layer in enumerate(model(case).layers):
        close(learned.keydiff(layer.k)[0], outputs["score_keydiff"][i])
        lagged = functools.partial(learned.lagkv, layer.k, layer.v, lag=lag)
        close(lagged()[0], outputs["score_lagkv"][i])
        close(lagged(cross_scoring=True)[0], outputs["score_lagkv_cross"][i])
        score = learned.dropkv(layer.q, layer.k, layer.v, window=meta["dropkv"]["window"])
        close(score[0], outputs["score_dropkv"][i], 1e-3)
        sketched = (layer.q, layer.k, layer.k_before, layer.v, jnp.asarray(outputs[f"sketch_{i}"]))
        base = learned.expected_attention(layer.q_before, layer.k, layer.v, model(case).rope, value_norm=False)
        for tag, removed in (("5", 0.5), ("8", 0.8)):
            compacted = functools.partial(learned.compactor, *sketched, removed, chunk=chunk)
            close(compacted(mask_padding=False)[0], outputs[f"score_compactor_{tag}"][i], 1e-4)
            first = max(1, int((1 - removed) * base.shape[2] * 0.5))
            critical = np.asarray(learned.criticalkv(base, layer.v, layer.output, first)[0])
            reference = outputs[f"score_critical_{tag}"][i]
            np.testing.assert_array_equal(critical > 1e38, reference > 1e38)
            close(critical[reference < 1e38], reference[reference < 1e38])
            rows = np.sort(outputs[f"kept_critical_{tag}"][i])
            np.testing.assert_array_equal(np.sort(np.argsort(-critical, kind="stable")[:, : rows.shape[1]]), rows)
    close(learned.lagkv(model(case).layers[0].k, model(case).layers[0].v)[0], outputs["score_lagkv_short"][0])
    with pytest.raises(AssertionError):  # what fills the last chunk up counts in the reference
        close(compacted()[0], outputs["score_compactor_8"][1], 1e-4)
    with pytest.raises(AssertionError):
        close(learned.lagkv(layer.k, layer.v, lag=lag + 1)[0], outputs["score_lagkv"][1])


def test_lag_survives_channels_that_do_not_change():
    keys, values = tensors(1)[1:]
    scores = learned.lagkv(keys.at[..., 0].set(1.0), values.at[..., :4].set(0.0), lag=8)
    assert np.isfinite(scores).all()


def test_leverage_of_keys_too_long_for_the_jitter():
    keys = jnp.ones((1, 2, 32, 8)) * 1e6 + tensors(1)[1][:, :, :32]
    result = leverage(keys, learned.draw_sketch(jax.random.key(0), 8), jnp.ones((1, 2, 32), bool))
    assert np.isfinite(result).all()


@pytest.mark.parametrize("tokens", [1, 7, 8, 12])
def test_compactor_of_a_text_that_it_protects_as_a_whole(tokens):
    queries, keys, values = tensors(1, tokens=tokens)
    scores = learned.compactor(queries, keys, keys, values, SKETCH, 0.5)
    assert scores.shape == (1, 2, tokens)
    assert np.isfinite(scores).all()


def test_projected_norms_are_those_of_projected_values():
    values = tensors(1)[2]
    output = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 12)), jnp.float32)
    for order in (1, 2):
        with mock.patch("clusterkv_jax.learned.output.ROWS_AT_ONCE", 7):
            result = learned.projected_norms(values, output, order=order)
        projected = np.einsum("bhnd,hdm->bhnm", np.repeat(values, 2, axis=1), output)
        close(result, np.linalg.norm(projected, ord=order, axis=-1))


# --- padding and batches ---


def tensors(seed, batch=1, tokens=48):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(batch, heads, tokens, 8)), jnp.float32) for heads in (4, 2, 2)]


ROPE = Rope(1e4, 8)
OUTPUT = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 12)), jnp.float32)
SKETCH = learned.draw_sketch(jax.random.key(0), 8, 16)
SCORES = {
    "expected_attention": lambda q, k, v, n: learned.expected_attention(q, k, v, ROPE, future=16, lengths=n),
    "keydiff": lambda q, k, v, n: learned.keydiff(k, lengths=n),
    "lagkv": lambda q, k, v, n: learned.lagkv(k, v, lag=6, lengths=n),
    "lagkv, crossed": lambda q, k, v, n: learned.lagkv(k, v, lag=6, cross_scoring=True, lengths=n),
    "compactor": lambda q, k, v, n: learned.compactor(q, k, k, v, SKETCH, 0.5, chunk=8, first=2, last=1, lengths=n),
    "criticalkv": lambda q, k, v, n: learned.criticalkv(k[..., 0], v, OUTPUT, 3, lengths=n),
    "dropkv": lambda q, k, v, n: learned.dropkv(q, k, v, window=4, kernel=3, lengths=n),
}


@functools.cache
def jitted(name):
    return jax.jit(SCORES[name])


@pytest.mark.parametrize("name", SCORES)
@given(seed=st.integers(0, 10**6), short=st.sampled_from([5, 13, 19, 47]))
def test_padding_never_matters_and_a_sequence_does_not_depend_on_its_batch(name, seed, short):
    rows, lengths = tensors(seed, batch=2), (48, short)
    padding = (ordinals(48, 2) >= jnp.asarray(lengths)[:, None])[:, None, :, None]
    poisoned = [jnp.where(padding, jnp.nan, x) for x in rows]
    both = jitted(name)(*poisoned, jnp.asarray(lengths))
    assert both.dtype == jnp.float32
    for i, n in enumerate(lengths):
        alone = jitted(name)(*(x[i : i + 1, :, :n] for x in rows), None)[0]
        close(both[i, :, :n], alone, 1e-3 if name == "dropkv" else 1e-4)
        assert (np.asarray(both[i, :, n:]) == -np.inf).all()


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_bfloat16_are_float32(name):
    rows = [x.astype(jnp.bfloat16) for x in tensors(3)]
    assert SCORES[name](*rows, None).dtype == jnp.float32


# --- methods and mistakes ---


def test_compactor_takes_the_share_that_is_dropped():
    queries, keys, values = tensors(4)
    budget = ckv.Budget(ratio=0.25)
    method = ckv.Compactor(budget, sinks=2, recent=2, chunk=8)
    for blending, same in ((0.75, True), (0.0, False)):
        other = ckv.Compactor(budget, sinks=2, recent=2, chunk=8, blending=blending)
        pair = [ckv.compress(m, queries, keys, values).positions for m in (method, other)]
        assert np.array_equal(*pair) == same


def test_unequal_heads_get_unequal_scores():
    """Values of one head ten times as long: over a layer it gets nearly all rows."""
    queries, keys, values = tensors(5)
    values = values.at[:, 1].multiply(10)
    method = ckv.ExpectedAttention(ckv.Budget(ratio=0.25), scope="layer")
    layer = ckv.compress(method, queries, keys, values)
    assert int(layer.length.sum()) == 24
    assert int(layer.length[0, 1]) > 15


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda q, k, v: learned.expected_attention(q, k, v, ROPE, sinks=48), "more tokens than sinks = 48, got 48"),
        (lambda q, k, v: learned.expected_attention(q, k, v, ROPE, future=0), "future must be a whole .* 1, got 0"),
        (lambda q, k, v: learned.expected_attention(q[:, :3], k, v, ROPE), "H a multiple of K, got"),
        (lambda q, k, v: learned.expected_attention(q, k, v[:, :1], ROPE), "keys and values must have the same shape"),
        (lambda q, k, v: learned.keydiff(k, lengths=jnp.asarray([49])), "lengths must be 1 numbers between 1 and 48"),
        (lambda q, k, v: learned.lagkv(k, v, lag=0), "lag must be a whole number of at least 1, got 0"),
        (lambda q, k, v: learned.dropkv(q, k, v, kernel=4), "kernel must be an odd number of rows, got 4"),
        (lambda q, k, v: learned.projected_norms(v, OUTPUT[:, :7]), r"output must be \[H,8,M\] .* got \(4, 7, 12\)"),
        (lambda q, k, v: learned.surrogate(OUTPUT[0], OUTPUT[0, :, 0], q[0]), r"weights must be \[8, outputs\]"),
        (lambda q, k, v: learned.match(q[0, 0], k[0, 0], v[0, 0], None, 49), "t must be at most 48, .* got 49"),
        (
            lambda q, k, v: learned.match(q[0, 0], k[0, 0], v[0, 0], None, 4, select="max"),
            '"rms" or "omp", got \'max\'',
        ),
        (lambda q, k, v: learned.match(q[0, 0], k[0, 0], v[0, 0], jnp.arange(3), 4), r"rows must be t = 4 .* \(3,\)"),
        (
            lambda q, k, v: learned.refit(*(x[0, 0] for x in (q, k, v, k)), v[0, 0, 1:], v[0, 0, :, 0]),
            r"log_bias \[t\]",
        ),
        (
            lambda q, k, v: learned.refit(*(x[0, 0] for x in (q, k, v, k, v)), v[0, 0, :, 0], ridge=-1),
            "ridge must be a",
        ),
        (
            lambda q, k, v: learned.surrogate(OUTPUT[0], OUTPUT[0, 0], q[0, 0]),
            r"hidden must be an array \[B,N,M\], got",
        ),
        (lambda q, k, v: learned.match(q[0, 0, :0], k[0, 0], v[0, 0], None, 4), "queries must be at least 1"),
        (
            lambda q, k, v: learned.match(q[0, 0], k[0, 0], v[0, 0], jnp.asarray([0, 48, 3]), 3),
            "rows must be between 0 and 47, or -1 for none, got 48",
        ),
        (lambda q, k, v: repeated(prompts=[[1], [2, -1]]), r"prompts hold id -1 \(piece 1\); allowed are 0 to 60"),
        (lambda q, k, v: repeated(61), r"tokens hold id 61 \(sequence 0, token 19\); allowed are 0 to 60"),
        (lambda q, k, v: repeated(lengths=np.asarray([21])), "lengths must be 1 numbers between 1 and 20"),
        (lambda q, k, v: repeated(prompts=[[1]]), "prompts must be 2, one for each piece of 16 of 20 tokens, got 1"),
        (lambda q, k, v: repeated(chunk=0), "chunk must be a whole number of at least 1, got 0"),
        (lambda q, k, v: repeated(prefix=20), "prefix must be smaller than the context of 20 tokens, got 20"),
        (lambda q, k, v: ckv.KeyDiff(HALF, scope="model"), 'KeyDiff scope must be "head" or "layer", got \'model\''),
        (lambda q, k, v: ckv.KeyDiff(HEADS, scope="layer"), "KeyDiff budget must be one without shares per head"),
        (
            lambda q, k, v: ckv.LagKV(HALF, decode_interval=0),
            "LagKV decode_interval must be a whole number of at least 1",
        ),
        (lambda q, k, v: ckv.ExpectedAttention(HALF, epsilon=-1), "epsilon must be a number of at least 0, got -1"),
        (lambda q, k, v: ckv.compress(ckv.ExpectedAttention(HALF), None, k, v), "queries must be .* got None"),
        (lambda q, k, v: ckv.compress(ckv.LagKV(ckv.Budget(tokens=4)), None, k, v), "must be more than sinks = 4"),
    ],
)
def test_mistakes_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make(*tensors(0))


HALF = ckv.Budget(ratio=0.5)
HEADS = ckv.Budget(ratio=0.5, shares=((1.0, 2.0),))


def repeated(last=0, **settings):
    small = tiny()
    ids = jnp.asarray([[*prompt(1, 19), last]])
    return learned.reconstruction(small.params, small.config, ids, **({"chunk": 16, "prompts": [[1], [2]]} | settings))
