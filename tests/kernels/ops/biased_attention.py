"""Attention with a bias by degree: checks, backends, broken variants, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.test_util import check_grads

from clusterkv_jax.kernels.biased_attention import biased_attention, pallas_gpu, pallas_tpu, reference
from clusterkv_jax.kernels.biased_attention.derivative import differentiable
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import CODES, Quantised, dequantised, quantise
from tests.kernels.base import F32, changed, compiled, drawn, lengths, near, normal, poisoned, tolerance

BACKENDS = {
    "xla": reference.biased_attention,
    "gpu": partial(pallas_gpu.biased_attention, sizes={"block": 64, "span": 128}, interpret=True),
    "tpu": partial(pallas_tpu.biased_attention, block=128, interpret=True),
}

# batch, tokens, query heads, KV heads, slots, head dim, dtype
ATTENTION_SHAPES = [
    (2, 3, 4, 2, 300, 24, jnp.float32),
    (2, 1, 2, 1, 17, 16, jnp.bfloat16),
    (2, 9, 4, 2, 40, 16, jnp.float32),  # a CPU takes so many queries head after head
]
CAPPED_SHAPES = [(1, 2, 4, 2, 150, 16, jnp.float32)]
# For the interpreter that watches for races, which is slow.
STRICT_SHAPES = {"one-head": (2, 1, 2, 1, 130, 8, jnp.float32), "two-heads": (1, 3, 8, 2, 260, 16, jnp.bfloat16)}


def attention_oracle(q, keys, values, degree, length, soft_cap=None):
    batch, tokens, heads, dim = q.shape
    slots = keys.shape[2]
    empty = (degree == 0) | (np.arange(slots) >= length[..., None])
    keys, values = (np.where(empty[..., None], 0, x) for x in (keys, values))
    bias = np.where(empty, -np.inf, np.log(np.where(empty, 1, degree)))
    grouped = q.reshape(batch, tokens, keys.shape[1], -1, dim)
    score = np.einsum("btkgd,bkcd->bkgtc", grouped, keys) / np.sqrt(dim)
    score = (score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)) + bias[:, :, None, None]
    peak = score.max(axis=-1, keepdims=True, initial=-np.inf)
    weight = np.exp(score - np.where(np.isfinite(peak), peak, 0))
    total = weight.sum(axis=-1, keepdims=True)
    probs = weight / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.moveaxis((peak + np.log(total))[..., 0], 3, 1).reshape(batch, tokens, heads)
    out = np.einsum("bkgtc,bkcd->btkgd", probs, values).reshape(q.shape)
    return out, lse, probs.sum(axis=3).reshape(batch, heads, slots)


def attention_case(shape, seed, holes):
    """q, keys, values and degrees; a share of the slots is empty."""
    batch, tokens, heads, kv_heads, slots, dim, dtype = shape
    q = normal(seed, batch, tokens, heads, dim)
    keys, values = (normal(seed + i, batch, kv_heads, slots, dim) for i in (1, 2))
    rng = np.random.default_rng(seed)
    degree = rng.integers(1, 9, (batch, kv_heads, slots)) * (rng.random((batch, kv_heads, slots)) >= holes)
    return (*(np.asarray(x, dtype) for x in (q, keys, values)), np.asarray(degree, np.float32))


def check_attention(implementation, *, shapes=ATTENTION_SHAPES, examples=6):
    for shape in shapes:
        check_attention_of(shape, implementation, examples)


def check_capped_attention(implementation, *, shapes=CAPPED_SHAPES, examples=3):
    for shape in shapes:
        check_attention_of(shape, implementation, examples, soft_cap=0.7)


def check_attention_of(shape, implementation, examples, **cap):
    batch, _, _, kv_heads, slots, _, dtype = shape
    run = compiled(partial(implementation, **cap, return_lse=True, return_probs=True))

    def check(seed, holes, length):
        q, keys, values, degree = attention_case(shape, seed, holes)
        expected = attention_oracle(*(np.asarray(x, np.float64) for x in (q, keys, values, degree)), length, **cap)
        beyond = np.arange(slots) >= length[..., None]
        dirty = (poisoned(x, (degree == 0) | beyond) for x in (keys, values))
        out, lse, probs = run(q, *dirty, np.where(beyond, np.float32(3), degree), length)
        assert (out.dtype, lse.dtype, probs.dtype) == (dtype, jnp.float32, jnp.float32)
        near(out, expected[0], tolerance(dtype), axes=(1, 3))
        near(lse, expected[1], F32, axes=1)
        near(probs, expected[2], F32, axes=2)

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.sampled_from([0.0, 0.3, 1.0]),
        lengths(batch, kv_heads, slots, 16, 128, 256, slots),
    )


def with_a_split_off_by_one(q, keys, values, degree, length, *, return_lse, return_probs):
    """Two parts that are combined as they should be, but the second begins one slot late."""
    half, both = keys.shape[2] // 2, {"return_lse": True, "return_probs": True}
    parts = []
    for a, b in ((0, half), (half + 1, keys.shape[2])):
        cut = (x[:, :, a:b] for x in (keys, values, degree))
        parts.append(reference.biased_attention(q, *cut, jnp.clip(length - a, 0, b - a), **both))
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    share = [jnp.where(jnp.isfinite(lse), jnp.exp(part[1] - lse), 0.0) for part in parts]
    out = sum(s[..., None] * part[0].astype(jnp.float32) for s, part in zip(share, parts, strict=True))
    probs = [part[2] for part in parts]
    return out.astype(q.dtype), lse, jnp.concatenate([probs[0], probs[0][..., :1] * 0, probs[1]], axis=-1)


def with_a_cap_of_the_bias_too(q, keys, values, degree, length, *, soft_cap, **options):
    """A degree of d adds cap tanh(log d / cap) where the scores are small."""
    biased = jnp.where(degree > 0, jnp.exp(soft_cap * jnp.tanh(jnp.log(jnp.maximum(degree, 1)) / soft_cap)), 0.0)
    return reference.biased_attention(q, keys, values, biased, length, soft_cap=soft_cap, **options)


# batch, tokens, query heads, KV heads, slots, head dim, dtype of the queries
CODED_SHAPES = [(2, 1, 4, 2, 150, 32, jnp.float32), (1, 2, 4, 1, 300, 64, jnp.bfloat16)]
# Queries of 16 bits are turned, or divided by their largest number, and rounded once more.
CODED = {jnp.float32: F32, jnp.bfloat16: 1e-2}


def check_coded_attention(implementation, *, shapes=CODED_SHAPES, examples=3):
    for shape in shapes:
        for name in CODES:
            check_coded_attention_of(shape, name, implementation, examples)


def check_coded_attention_of(shape, name, implementation, examples):
    """Attention over the rows that the codes stand for; codes and scales of empty slots are whatever they are."""
    batch, _, _, kv_heads, slots, _, dtype = shape
    run = compiled(partial(implementation, return_lse=True, return_probs=True))
    store, whole = compiled(partial(quantise, name=name)), compiled(dequantised)

    def check(seed, holes, length):
        q, keys, values, degree = attention_case((*shape[:-1], jnp.float32), seed, holes)
        q, spread = np.asarray(q, dtype), 10 ** np.random.default_rng(seed).uniform(-2, 0, (2, *degree.shape, 1))
        keys, values = (store(np.asarray(x, np.float32)) for x in (keys * spread[0], values * spread[1]))
        rows = (np.asarray(whole(x), np.float64) for x in (keys, values))
        expected = attention_oracle(np.asarray(q, np.float64), *rows, np.asarray(degree, np.float64), length)
        beyond = np.arange(slots) >= length[..., None]
        empty = (degree == 0) | beyond
        dirty = [Quantised(spoilt(x.codes, empty), poisoned(x.scales, empty)) for x in (keys, values)]
        out, lse, probs = run(q, *dirty, np.where(beyond, np.float32(3), degree), length)
        assert (out.dtype, lse.dtype, probs.dtype) == (dtype, jnp.float32, jnp.float32)
        for result, exact, axes in zip((out, lse, probs), expected, ((1, 3), 1, 2), strict=True):
            near(result, exact, CODED[dtype], axes)

    some = lengths(batch, kv_heads, slots, 16, 128, 256, slots)
    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]), some)


def spoilt(codes, empty):
    """NaN where codes have it, else all bits."""
    codes = np.asarray(codes)
    return np.where(
        empty[..., None], np.full_like(codes, -1 if codes.dtype == np.int8 else 255).view(codes.dtype), codes
    )


def _one_scale(rows):
    occupied = jnp.where(jnp.isfinite(rows.scales), rows.scales, 0.0)
    return Quantised(rows.codes, jnp.broadcast_to(jnp.max(occupied, axis=2, keepdims=True), rows.scales.shape))


def _halves_exchanged(rows):
    packed = rows.codes.dtype == jnp.uint8
    return Quantised((rows.codes << 4) | (rows.codes >> 4), rows.scales) if packed else rows


def without_turning_the_queries(q, keys, values, degree, length, **options):
    return reference.biased_attention.__wrapped__(q, keys, values, degree, length, **options)


wrong = partial(changed, reference.biased_attention)
CHECKS = [check_attention, check_capped_attention, check_coded_attention]
BROKEN = {
    check_attention: [
        wrong("without_log_degree", degree=lambda a: jnp.sign(a.degree)),
        wrong("without_length", length=None),
        with_a_split_off_by_one,
    ],
    check_capped_attention: [wrong("without_soft_cap", soft_cap=None), with_a_cap_of_the_bias_too],
    check_coded_attention: [
        wrong("without_the_scales_of_keys", keys=lambda a: _one_scale(a.keys)),
        wrong("without_the_scales_of_values", values=lambda a: _one_scale(a.values)),
        wrong("with_the_halves_of_keys_exchanged", keys=lambda a: _halves_exchanged(a.keys)),
        wrong("with_the_halves_of_values_exchanged", values=lambda a: _halves_exchanged(a.values)),
        without_turning_the_queries,
    ],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_attention_has_derivatives(op):
    q, keys, values, degree = attention_case((1, 2, 2, 1, 6, 4, jnp.float32), 3, holes=0.0)

    @jax.jit
    def function(q, keys, values, log_degree):
        return differentiable(op)(q, keys, values, jnp.exp(log_degree), None, return_lse=True, return_probs=True)

    check_grads(function, (q, keys, values, jnp.log(degree)), order=1, modes=("fwd", "rev"), rtol=1e-2, atol=1e-3)


def test_capped_attention_has_derivatives():
    q, keys, values, degree = attention_case((1, 2, 2, 1, 6, 4, jnp.float32), 3, holes=0.0)
    function = jax.jit(partial(biased_attention, soft_cap=0.7, return_lse=True))
    check_grads(function, (q, keys, values, degree), order=1, modes=("fwd", "rev"), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_empty_slots_have_no_derivative_and_their_nan_reaches_none(op):
    q, keys, values, degree = attention_case((1, 2, 4, 2, 12, 4, jnp.float32), 5, holes=0.4)
    length = jnp.asarray([[9, 0]])
    empty = (degree == 0) | (ordinals(12, 3) >= length[..., None])

    @compiled
    def gradients(*operands):
        def loss(*operands):
            out, lse = differentiable(op)(*operands, length, return_lse=True, return_probs=False)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*operands)

    clean = gradients(q, keys, values, degree)
    dirty = gradients(q, *(poisoned(x, empty) for x in (keys, values)), degree)
    for result, expected in zip(dirty, clean, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    for x in dirty[1:]:
        assert not np.any(np.asarray(x)[np.asarray(empty)])
    assert np.any(np.asarray(dirty[3]))


@pytest.mark.parametrize("name", CODES)
def test_quantised_rows_are_near_the_rows(name):
    """Of normal rows: half a step, uniformly, over the row's root mean square."""
    rows = normal(3, 400, 128)
    stored = quantise(jnp.asarray(rows, jnp.float32), name)
    error = np.linalg.norm(dequantised(stored) - rows) / np.linalg.norm(rows)
    assert error == pytest.approx({"int8": 0.0065, "float8_e4m3": 0.026, "int4": 0.105}[name], rel=0.1)
    assert stored.shape == rows.shape


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(name):
    rows = jnp.zeros((3, 16)).at[1, 2].set(jnp.inf).at[2].set(jnp.nan)
    scales = np.asarray(quantise(rows, name).scales)
    assert not np.isfinite(scales[1:]).any()
    assert not np.any(dequantised(quantise(rows[:1], name)))


def test_rows_of_four_bits_need_a_power_of_two():
    with pytest.raises(ValueError, match="power of two, got 24"):
        quantise(jnp.ones((2, 24)), "int4")


def test_attention_does_not_depend_on_slot_order():
    q, keys, values, degree = map(jnp.asarray, attention_case((2, 1, 4, 2, 24, 16, jnp.float32), 6, holes=0.2))
    order = np.random.default_rng(8).permutation(24)
    mixed = biased_attention(q, keys[:, :, order], values[:, :, order], degree[:, :, order])
    near(mixed, biased_attention(q, keys, values, degree), 1e-6, axes=(1, 3))


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend"):
        biased_attention(jnp.ones((1, 1, 2, 4)), features, features, jnp.ones((1, 1, 4)), backend="cuda")
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        biased_attention(jnp.ones((1, 1, 3, 4)), jnp.ones((1, 2, 4, 4)), jnp.ones((1, 2, 4, 4)), jnp.ones((1, 2, 4)))


def test_a_backend_of_another_device_says_what_it_needs():
    x = jnp.ones((1, 1, 4, 4))
    with pytest.raises(NotImplementedError, match="backend 'tpu' needs a TPU, not a cpu"):
        biased_attention(x, x, x, x[..., 0], backend="tpu")


def test_the_tpu_kernel_says_what_it_does_not_serve():
    x = jnp.ones((1, 1, 200, 8))
    with pytest.raises(NotImplementedError, match="float32 or bfloat16, got float16"):
        pallas_tpu.biased_attention(*[x.astype(jnp.float16)] * 3, x[..., 0], None, return_lse=False, return_probs=False)
