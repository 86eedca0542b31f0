"""The best partner of every A row in its chunk: checks, backends, broken variants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.chunked_matching import chunked_matching, pallas_gpu, pallas_tpu, reference
from clusterkv_jax.kernels.quantised import Quantised, row_squares
from tests.kernels.base import F32, changed, compiled, drawn, exact, lengths, normal, poisoned, stored

BACKENDS = {
    "xla": reference.chunked_matching,
    "gpu": partial(pallas_gpu.chunked_matching, interpret=True),
    "tpu": partial(pallas_tpu.chunked_matching, block=256, interpret=True),
}

# batch, heads, rows, features, chunk, bias, normalize, start, dtype
MATCHING_SHAPES = [
    (2, 1, 600, 24, 16, True, False, False, jnp.float32),
    (1, 2, 37, 40, 6, False, True, True, jnp.bfloat16),
    (2, 2, 300, 16, 256, False, True, False, jnp.bfloat16),
    (1, 2, 90, 32, 16, False, True, False, "int8"),
    (1, 1, 37, 24, 6, False, True, True, "float8_e4m3"),
    (1, 2, 70, 16, 64, False, True, False, "int4"),
]
# For the interpreter that watches for races, which is slow.
STRICT_SHAPES = {
    "one-head": (2, 1, 300, 8, 16, True, False, False, jnp.float32),
    "two-heads": (1, 2, 520, 16, 256, False, True, True, jnp.bfloat16),
}


def matching_oracle(features, bias, chunk, normalize, start, length):
    """Scores of all pairs of a head's A and B rows, -inf for those that are none."""
    rows = features.shape[0]
    entries = features[np.minimum(start + np.arange(rows + rows % 2), rows - 1)]
    weight = bias[np.minimum(start + np.arange(rows + rows % 2), rows - 1)]
    entries = np.where((np.arange(len(entries)) < length)[:, None], entries, 0)
    if normalize:
        entries = entries / np.maximum(np.linalg.norm(entries, axis=-1, keepdims=True), 1e-30)
    score = entries[::2] @ entries[1::2].T + weight[::2, None] + weight[None, 1::2]
    a, b = np.arange(0, len(entries), 2)[:, None], np.arange(1, len(entries), 2)[None]
    return np.where((a // chunk == b // chunk) & (a < length) & (b < length), score, -np.inf)


def check_matching(implementation, *, shapes=MATCHING_SHAPES, examples=6):
    for shape in shapes:
        check_matching_of(shape, implementation, examples)


def check_matching_of(shape, implementation, examples):
    batch, heads, rows, width, chunk, biased, normalize, started, dtype = shape
    run = compiled(partial(implementation, chunk=chunk, normalize=normalize))

    def check(seed, ties, length, start):
        features, bias = normal(seed, batch, heads, rows, width), normal(seed + 1, batch, heads, rows)
        if ties:  # equal scores, exact in every arithmetic
            features, bias = np.sign(np.round(features)), np.round(bias)
            features = np.where(np.any(features != 0, -1, keepdims=True), features, 1)
        if normalize and ties:
            features = np.repeat(features[:, :, :1], rows, axis=2)
        start = start if started else np.zeros_like(start)
        length = np.minimum(length, rows - start)
        features, bias = stored(features, dtype), np.asarray(bias * biased, np.float32)
        here = np.arange(rows) - start[..., None]
        outside = (here < 0) | (here >= length[..., None])
        match, score = run(
            poisoned(features, outside),
            bias=poisoned(bias, outside) if biased else None,
            start=start if started else None,
            length=length,
        )
        assert (match.dtype, score.dtype) == (jnp.int32, jnp.float32)
        assert match.shape == score.shape == (batch, heads, (rows + 1) // 2)
        match, score, features = np.asarray(match), np.asarray(score), exact(features)
        for at in np.ndindex(batch, heads):
            expected = matching_oracle(features[at], exact(bias[at]), chunk, normalize, start[at], length[at])
            one_head(match[at], score[at], expected, start[at], ties)

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.booleans(),
        lengths(batch, heads, rows, chunk, 2 * chunk, 256, rows),
        lengths(batch, heads, rows - 1, chunk),
    )


# batch, heads, rows, head dim, chunk, listed by number, started behind the first row, dtype
PAIRED_SHAPES = [
    (1, 2, 70, 32, 64, True, False, "int8"),
    (2, 1, 37, 16, 8, False, True, jnp.float32),
    (1, 2, 90, 24, 64, True, False, jnp.bfloat16),
    (1, 2, 300, 16, 256, True, False, jnp.bfloat16),
]


def paired_oracle(keys, values, bias, weight, value_weight, chunk, start, length):
    """GravityKV's score of one head, A x B, in double precision; -inf where there is no edge."""
    inside = slice(start, start + length)
    keys, values, bias = keys[inside], values[inside], bias[inside]
    unit = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-30)
    distance = np.square(keys[:, None] - keys[None]).sum(-1)
    score = -weight * distance / 2 + value_weight * unit @ unit.T + bias[:, None] + bias[None]
    number = np.arange(len(keys))
    edge = (number[:, None] // chunk == number // chunk) & (number[:, None] % 2 == 0) & (number % 2 == 1)
    return np.where(edge, score, -np.inf)[::2, 1::2]


def check_paired(implementation, *, shapes=PAIRED_SHAPES, examples=4):
    """Edges by the distance of keys and the likeness of values, of rows in a row or listed."""
    for shape in shapes:
        check_paired_of(shape, implementation, examples)


def check_paired_of(shape, implementation, examples):
    batch, heads, rows, dim, chunk, listed, started, dtype = shape
    run = compiled(partial(implementation, chunk=chunk, normalize=False, value_weight=0.7))

    def check(seed, known, length, start):
        keys, values = (stored(normal(seed + i, batch, heads, rows, dim), dtype) for i in (0, 1))
        bias = np.asarray(normal(seed + 2, batch, heads, rows), np.float32)
        weight = np.asarray(1 / (1 + np.abs(normal(seed + 3, batch, heads))), np.float32)
        start = start if started else np.zeros_like(start)
        length = np.minimum(length, rows - start)
        order = np.random.default_rng(seed).permuted(np.tile(np.arange(rows), (batch, heads, 1)), axis=-1)
        order = order if listed else np.tile(np.arange(rows), (batch, heads, 1))
        here = np.arange(rows) - start[..., None]
        outside = np.take_along_axis((here < 0) | (here >= length[..., None]), np.argsort(order, axis=-1), axis=-1)
        dirty = poisoned(keys, outside), poisoned(values, outside)
        match, score = run(
            dirty[0],
            values=dirty[1],
            squares=tuple(row_squares(jax.tree.map(jnp.asarray, x)) if known else None for x in dirty),
            bias=poisoned(bias, outside),
            key_weight=weight,
            start=start if started else None,
            length=length,
            index=np.asarray(order, np.int32) if listed else None,
        )
        match, score, keys, values = np.asarray(match), np.asarray(score), exact(keys), exact(values)
        for at in np.ndindex(batch, heads):
            tensors = (np.asarray(x[at], np.float64)[order[at]] for x in (keys, values, bias))
            expected = paired_oracle(*tensors, float(weight[at]), 0.7, chunk, start[at], length[at])
            full = np.full(((rows + 1) // 2, max(1, expected.shape[1])), -np.inf)
            full[: len(expected), : expected.shape[1]] = expected
            one_head(match[at], score[at], full, start[at], False)

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.booleans(),
        lengths(batch, heads, rows, chunk, rows),
        lengths(batch, heads, rows - 1, chunk),
    )


def one_head(match, score, expected, start, ties):
    """Scores are the best ones, and matches stand where those are: exactly if there may be ties."""
    best = expected.max(axis=1)
    np.testing.assert_array_equal(match < 0, np.isneginf(best))
    np.testing.assert_allclose(score, best, atol=F32 * max(1, np.abs(best[np.isfinite(best)]).max(initial=0)), rtol=0)
    edge = match >= 0
    partner = (match[edge] - start - 1) // 2
    np.testing.assert_array_equal((match[edge] - start) % 2, 1)
    if ties:
        np.testing.assert_array_equal(partner, np.round(expected[edge], 9).argmax(axis=1))
    else:
        np.testing.assert_allclose(expected[edge, partner], best[edge], atol=F32 * 10, rtol=0)


def matching_by_codes_alone(features, *, values, **options):
    """Keys of int8 in units of their scales, as if those were all 1."""
    if isinstance(features, Quantised):
        features = Quantised(features.codes, jnp.ones_like(features.scales))
    return reference.chunked_matching(features, values=values, **options)


wrong = partial(changed, reference.chunked_matching)
CHECKS = [check_matching, check_paired]
BROKEN = {
    check_matching: [
        wrong("without_tail_mask", length=None),
        wrong("of_longer_chunks", chunk=lambda a: a.chunk + 2),
        wrong("without_bias", bias=None),
    ],
    check_paired: [
        wrong("of_one_value_weight", value_weight=1.0),
        wrong("without_distance", key_weight=lambda a: jnp.zeros_like(a.key_weight)),
        matching_by_codes_alone,
    ],
}


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        chunked_matching(features, chunk=4, backend="cuda")
    with pytest.raises(ValueError, match="even number"):
        chunked_matching(features, chunk=5)


def test_rows_of_zero_values_have_edges_beside_huge_keys():
    keys, values = (jnp.asarray(normal(seed, 1, 1, 16, 8), jnp.float32) for seed in (1, 2))
    keys, values = 1e12 * keys, values.at[:, :, ::3].set(0.0)
    weight = 1 / jnp.mean(jnp.sum(keys**2, axis=-1), axis=-1)
    options = {"chunk": 16, "bias": None, "normalize": False, "start": None, "length": None}
    want, _ = reference.chunked_matching(keys, values=values, key_weight=weight, **options)
    match, _ = pallas_gpu.chunked_matching(keys, values=values, key_weight=weight, interpret=True, **options)
    np.testing.assert_array_equal(match, want)


def test_a_backend_of_another_device_says_what_it_needs():
    with pytest.raises(NotImplementedError, match="backend 'tpu' needs a TPU, not a cpu"):
        chunked_matching(jnp.ones((1, 1, 4, 4)), chunk=4, backend="tpu")


def test_the_tpu_kernel_says_what_it_does_not_serve():
    x = jnp.ones((1, 1, 200, 8))
    with pytest.raises(NotImplementedError, match="Chunks of 198 rows"):
        pallas_tpu.chunked_matching(x, chunk=198, bias=None, normalize=True, start=None, length=None, block=256)
