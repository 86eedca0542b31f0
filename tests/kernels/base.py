"""One test base for all backends of all ops: hypothesis draws the cases, float64 numpy says what is right.

A check takes an implementation with the signature of the op's reference and raises AssertionError where it is wrong;
`kernel_checks` says which one belongs to which op, test_kernel_base calls it with what is broken on purpose. Shapes are
few, because every one compiles; what is drawn are contents: lengths around the edges of chunks and blocks, empty slots,
ties. What must not matter is NaN.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# Relative norms, the worst head's.
F32, BF16 = 1e-5, 5e-3


def tolerance(dtype):
    return F32 if dtype == jnp.float32 else BF16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def near(found, expected, bound, axes):
    """The relative norm of the difference over `axes` is within `bound`; where infinite, both are."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    error = np.linalg.norm(np.where(finite, found - np.where(finite, expected, 0), 0), axis=axes)
    size = np.linalg.norm(np.where(finite, expected, 0), axis=axes)
    assert np.all(error <= bound * size), f"relative error {np.max(error / np.maximum(size, 1e-30))}, allowed {bound}"


def drawn(check, examples, *strategies):
    """Run `check` over drawn cases. No shrinking: a failing case is small already and each step would be slow."""
    quiet = settings(
        max_examples=examples,
        deadline=None,  # a first example compiles
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    quiet(given(*strategies)(check))()


def edges(*sizes):
    """Lengths where loops go wrong: none, one, and one less and more than each size; the largest is drawn first."""
    return st.sampled_from(sorted({0, 1, *(n + d for n in sizes for d in (-1, 0, 1))}, reverse=True))


def lengths(batch, heads, largest, *sizes):
    one = edges(*sizes).map(lambda n: min(n, largest))
    return st.lists(one, min_size=batch * heads, max_size=batch * heads).map(
        lambda n: np.asarray(n, np.int32).reshape(batch, heads)
    )


# --- biased attention

# batch, tokens, query heads, KV heads, slots, head dim, dtype
ATTENTION_SHAPES = [(2, 3, 4, 2, 300, 24, jnp.float32), (2, 1, 2, 1, 17, 16, jnp.bfloat16)]


def attention_oracle(q, keys, values, degree, length):
    batch, tokens, heads, dim = q.shape
    slots = keys.shape[2]
    empty = (degree == 0) | (np.arange(slots) >= length[..., None])
    keys, values = (np.where(empty[..., None], 0, x) for x in (keys, values))
    bias = np.where(empty, -np.inf, np.log(np.where(empty, 1, degree)))
    grouped = q.reshape(batch, tokens, keys.shape[1], -1, dim)
    score = np.einsum("btkgd,bkcd->bkgtc", grouped, keys) / np.sqrt(dim) + bias[:, :, None, None]
    peak = score.max(axis=-1, keepdims=True)
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
    return (*(jnp.asarray(x, dtype) for x in (q, keys, values)), jnp.asarray(degree, jnp.float32))


def poisoned(x, empty):
    return jnp.where(empty[..., None] if x.ndim > empty.ndim else empty, jnp.nan, x).astype(x.dtype)


def check_attention(implementation, *, shapes=ATTENTION_SHAPES, examples=6):
    for shape in shapes:
        check_attention_of(shape, implementation, examples)


def check_attention_of(shape, implementation, examples):
    batch, _, _, kv_heads, slots, _, dtype = shape
    run = jax.jit(partial(implementation, return_lse=True, return_probs=True))

    def check(seed, holes, length):
        q, keys, values, degree = attention_case(shape, seed, holes)
        expected = attention_oracle(*(np.asarray(x, np.float64) for x in (q, keys, values, degree)), length)
        beyond = jnp.arange(slots) >= jnp.asarray(length)[..., None]
        dirty = (poisoned(x, (degree == 0) | beyond) for x in (keys, values))
        out, lse, probs = run(q, *dirty, jnp.where(beyond, 3.0, degree), jnp.asarray(length))
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


# --- accumulated attention

# batch, query heads, KV heads, tokens, head dim, dtype
ACCUMULATED_SHAPES = [
    (2, 4, 1, 300, 24, jnp.float32),
    (2, 2, 2, 140, 128, jnp.bfloat16),
    (1, 2, 1, 5, 16, jnp.bfloat16),
]


def accumulated_oracle(q, keys, lengths):
    tokens, dim = q.shape[2:]
    real = (np.arange(tokens) < lengths[:, None])[:, None, None, :, None]
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, tokens, dim)
    score = np.einsum("bkgtd,bknd->bkgtn", grouped, keys) / np.sqrt(dim)
    weight = np.where(np.tri(tokens, dtype=bool), np.exp(score - score.max(axis=-1, keepdims=True)), 0)
    return np.mean(np.sum(np.where(real, weight / weight.sum(axis=-1, keepdims=True), 0), axis=3), axis=2)


def check_accumulated(implementation, *, shapes=ACCUMULATED_SHAPES, examples=6):
    for shape in shapes:
        check_accumulated_of(shape, implementation, examples)


def check_accumulated_of(shape, implementation, examples):
    batch, heads, kv_heads, tokens, dim, dtype = shape
    run = jax.jit(implementation)

    def check(seed, length):
        length = length[:, 0]
        q, keys = (jnp.asarray(normal(seed + i, batch, n, tokens, dim), dtype) for i, n in enumerate((heads, kv_heads)))
        expected = accumulated_oracle(*(np.asarray(x, np.float64) for x in (q, keys)), length)
        beyond = (jnp.arange(tokens) >= jnp.asarray(length)[:, None])[:, None]
        sums = run(poisoned(q, beyond), poisoned(keys, beyond), jnp.asarray(length))
        assert sums.dtype == jnp.float32
        near(sums, expected, F32, axes=2)
        assert not np.any(np.where(beyond, sums, 0))

    drawn(check, examples, st.integers(0, 2**16), lengths(batch, 1, tokens, 64, 128, 256, tokens))


# --- chunked matching

# batch, heads, rows, features, chunk, bias, normalize, start, dtype
MATCHING_SHAPES = [
    (2, 1, 600, 24, 16, True, False, False, jnp.float32),
    (1, 2, 37, 40, 6, False, True, True, jnp.bfloat16),
    (2, 2, 300, 16, 256, False, True, False, jnp.bfloat16),
]


def matching_oracle(features, bias, chunk, normalize, start, length):
    """Scores of all pairs of a head's A and B rows, -inf for those that are none."""
    rows = features.shape[0]
    taken = features[np.minimum(start + np.arange(rows + rows % 2), rows - 1)]
    weight = bias[np.minimum(start + np.arange(rows + rows % 2), rows - 1)]
    taken = np.where((np.arange(len(taken)) < length)[:, None], taken, 0)
    if normalize:
        taken = taken / np.maximum(np.linalg.norm(taken, axis=-1, keepdims=True), 1e-30)
    score = taken[::2] @ taken[1::2].T + weight[::2, None] + weight[None, 1::2]
    a, b = np.arange(0, len(taken), 2)[:, None], np.arange(1, len(taken), 2)[None]
    return np.where((a // chunk == b // chunk) & (a < length) & (b < length), score, -np.inf)


def check_matching(implementation, *, shapes=MATCHING_SHAPES, examples=6):
    for shape in shapes:
        check_matching_of(shape, implementation, examples)


def check_matching_of(shape, implementation, examples):
    batch, heads, rows, width, chunk, biased, normalize, started, dtype = shape
    run = jax.jit(partial(implementation, chunk=chunk, normalize=normalize))

    def check(seed, ties, length, start):
        features, bias = normal(seed, batch, heads, rows, width), normal(seed + 1, batch, heads, rows)
        if ties:  # equal scores, exact in every arithmetic
            features, bias = np.sign(np.round(features)), np.round(bias)
            features = np.where(np.any(features != 0, -1, keepdims=True), features, 1)
        if normalize and ties:
            features = np.repeat(features[:, :, :1], rows, axis=2)
        start = start if started else np.zeros_like(start)
        length = np.minimum(length, rows - start)
        features, bias = jnp.asarray(features, dtype), jnp.asarray(bias * biased, jnp.float32)
        here = np.arange(rows) - start[..., None]
        outside = jnp.asarray((here < 0) | (here >= length[..., None]))
        match, score = run(
            poisoned(features, outside),
            bias=poisoned(bias, outside) if biased else None,
            start=jnp.asarray(start) if started else None,
            length=jnp.asarray(length),
        )
        assert (match.dtype, score.dtype) == (jnp.int32, jnp.float32)
        assert match.shape == score.shape == (batch, heads, (rows + 1) // 2)
        for at in np.ndindex(batch, heads):
            expected = matching_oracle(
                *(np.asarray(x[at], np.float64) for x in (features, bias)), chunk, normalize, start[at], length[at]
            )
            one_head(np.asarray(match[at]), np.asarray(score[at]), expected, start[at], ties)

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.booleans(),
        lengths(batch, heads, rows, chunk, 2 * chunk, 256, rows),
        lengths(batch, heads, rows - 1, chunk),
    )


# batch, heads, rows, head dim, chunk, listed by number, started behind the first row, dtype
PAIRED_SHAPES = [(2, 1, 37, 16, 8, False, True, jnp.float32), (1, 2, 90, 24, 64, True, False, jnp.bfloat16)]


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
    run = jax.jit(partial(implementation, chunk=chunk, normalize=False, value_weight=0.7))

    def check(seed, length, start):
        keys, values = (jnp.asarray(normal(seed + i, batch, heads, rows, dim), dtype) for i in (0, 1))
        bias = jnp.asarray(normal(seed + 2, batch, heads, rows), jnp.float32)
        weight = jnp.asarray(1 / (1 + np.abs(normal(seed + 3, batch, heads))), jnp.float32)
        start = start if started else np.zeros_like(start)
        length = np.minimum(length, rows - start)
        order = np.random.default_rng(seed).permuted(np.tile(np.arange(rows), (batch, heads, 1)), axis=-1)
        order = order if listed else np.tile(np.arange(rows), (batch, heads, 1))
        here = np.arange(rows) - start[..., None]
        outside = np.take_along_axis((here < 0) | (here >= length[..., None]), np.argsort(order, axis=-1), axis=-1)
        match, score = run(
            poisoned(keys, jnp.asarray(outside)),
            values=poisoned(values, jnp.asarray(outside)),
            bias=poisoned(bias, jnp.asarray(outside)),
            key_weight=weight,
            start=jnp.asarray(start) if started else None,
            length=jnp.asarray(length),
            index=jnp.asarray(order, jnp.int32) if listed else None,
        )
        for at in np.ndindex(batch, heads):
            tensors = (np.asarray(x[at], np.float64)[order[at]] for x in (keys, values, bias))
            expected = paired_oracle(*tensors, float(weight[at]), 0.7, chunk, start[at], length[at])
            full = np.full(((rows + 1) // 2, max(1, expected.shape[1])), -np.inf)
            full[: len(expected), : expected.shape[1]] = expected
            one_head(np.asarray(match[at]), np.asarray(score[at]), full, start[at], False)

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        lengths(batch, heads, rows, chunk, rows),
        lengths(batch, heads, rows - 1, chunk),
    )


def one_head(match, score, expected, start, ties):
    """Scores are the best ones, and matches stand where those are: exactly if there may be ties."""
    best = expected.max(axis=1)
    np.testing.assert_array_equal(match < 0, np.isneginf(best))
    np.testing.assert_allclose(score, best, atol=F32 * max(1, np.abs(best[np.isfinite(best)]).max(initial=0)), rtol=0)
    edge = match >= 0
    chosen = (match[edge] - start - 1) // 2
    np.testing.assert_array_equal((match[edge] - start) % 2, 1)
    if ties:
        np.testing.assert_array_equal(chosen, np.round(expected[edge], 9).argmax(axis=1))
    else:
        np.testing.assert_allclose(expected[edge, chosen], best[edge], atol=F32 * 10, rtol=0)


# --- new rows behind those that there are

# batch, heads, slots, tokens, head dim, dtypes of rows and slots, with positions
APPEND_SHAPES = [
    (2, 3, 20, 1, 24, jnp.float32, jnp.bfloat16, True),
    (2, 2, 40, 19, 16, jnp.bfloat16, jnp.bfloat16, True),
    (1, 2, 9, 5, 8, jnp.float16, jnp.float32, False),
]


def check_append(implementation, *, shapes=APPEND_SHAPES, examples=8):
    for shape in shapes:
        check_append_of(shape, implementation, examples)


def check_append_of(shape, implementation, examples):
    batch, heads, slots, tokens, dim, given, held, with_positions = shape
    run = jax.jit(implementation)

    def check(seed, share, length):
        rng = np.random.default_rng(seed)
        real = rng.random((batch, tokens)) < share
        empty = jnp.asarray(np.arange(slots) >= length[..., None])
        rows = [jnp.asarray(normal(seed + i, batch, heads, tokens, dim), given) for i in (0, 1)]
        rows = [poisoned(x, jnp.asarray(~real)[:, None]) for x in rows]
        buffers = [jnp.asarray(normal(seed + i, batch, heads, slots, dim), held) for i in (2, 3)]
        buffers = [poisoned(x, empty) for x in (*buffers, jnp.asarray(rng.integers(1, 9, empty.shape), jnp.float32))]
        positions = jnp.asarray(rng.integers(0, 99, empty.shape), jnp.int32) if with_positions else None
        new = jnp.asarray(rng.integers(100, 2**30, (batch, tokens)), jnp.int32)
        found = run(*buffers, positions, jnp.asarray(length), *rows, new, jnp.asarray(real))
        expected = [None if x is None else np.array(x) for x in (*buffers, positions)]
        stored = (*(np.asarray(x.astype(held)) for x in rows), np.ones((batch, heads, tokens)), new[:, None])
        for b, k, t in np.ndindex(batch, heads, tokens):
            if real[b, t] and length[b, k] + t < slots:
                for x, y in zip(expected[: 3 + with_positions], stored, strict=False):
                    x[b, k, length[b, k] + t] = y[b, min(k, y.shape[1] - 1), t]
        assert (found[3] is None) == (positions is None)
        for x, y in zip(found[: 3 + with_positions], expected, strict=False):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), y.view(np.uint8))

    largest = slots + 3
    shares = st.sampled_from([1.0, 0.5, 0.0])
    drawn(check, examples, st.integers(0, 2**16), shares, lengths(batch, heads, largest, slots - tokens, slots))
