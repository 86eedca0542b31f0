"""Merges of the best edges, in place: checks, backends, broken variants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from clusterkv_jax.kernels.quantised import Quantised, rotated, row_squares
from clusterkv_jax.kernels.row_merge import pallas_gpu, reference
from tests.kernels.base import changed, compiled, drawn, exact, lengths, near, normal, poisoned, stored, tolerance

BACKENDS = {
    "xla": reference.row_merge,
    "gpu": partial(pallas_gpu.row_merge, interpret=True),
    "gpu-in-turns": partial(pallas_gpu.row_merge, sizes={"moved_rows": 2, "move_programs": 1}, interpret=True),
}

# batch, heads, slots, entries of the list, head dim, chunk, dtype, and of how many (none, keys, both) squares are known
MERGE_SHAPES = [
    (1, 2, 60, 55, 24, 20, "int8", 2),
    (2, 2, 160, 149, 20, 32, jnp.float32, 2),
    (1, 2, 70, 70, 64, 64, jnp.bfloat16, 0),
    (1, 1, 60, 60, 32, 16, "float8_e4m3", 1),
    (1, 2, 50, 44, 16, 16, "int4", 0),
]
# A merged row's error in units of its largest number: half a step of its codes.
STEP = {"int8": 0.51 / 127, "float8_e4m3": 0.51 / 8, "int4": 1.01 / 16}


def check_row_merge(implementation, *, shapes=MERGE_SHAPES, examples=6):
    for shape in shapes:
        check_row_merge_of(shape, implementation, examples)


def check_row_merge_of(shape, implementation, examples):
    batch, heads, slots, listed, dim, chunk, dtype, squared = shape
    run = compiled(partial(implementation, chunk=chunk))

    def check(seed, levels, length, share, lost, few):
        """Equal scores at the limit, batch rows that are done, slots not on the list, all a rows of a chunk for a few b
        rows; heads that have overflowed, which count more rows than their list has.
        """
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.permuted(np.tile(np.arange(slots), (batch, heads, 1)), axis=2)[..., :listed])
        occupancy = np.zeros((batch, heads, slots), bool)
        np.put_along_axis(occupancy, np.where(np.arange(listed) < length[..., None], rows, rows[..., :1]), True, axis=2)
        occupancy[length == 0] = False
        keys, values = (stored(normal(seed + i, batch, heads, slots, dim), dtype) for i in (1, 2))
        dirty = [poisoned(x, ~occupancy) for x in (keys, values)]
        degree = rng.integers(1, 90000, occupancy.shape)
        match, score = drawn_edges(rng, length, listed, chunk, levels, few)
        merges = (share * np.min(np.sum(match >= 0, axis=2), axis=1)).astype(np.int32)
        counted = np.where(length == listed, length + lost, length)
        ints = [np.asarray(x, np.int32) for x in (rows, counted, match)]
        operands = (np.asarray(degree, np.float32), *ints, np.asarray(score, np.float32), merges)
        both = [np.asarray(row_squares(jax.tree.map(jnp.asarray, x))) for x in dirty]
        squares = tuple(x if at < squared else None for at, x in enumerate(both))
        keys, values, *rest, new_squares = run(*dirty, *operands, squares)
        assert jax.tree.map(lambda x: x.dtype, [keys, values, *rest]) == jax.tree.map(
            lambda x: x.dtype, [*dirty, operands[0], operands[1]]
        )
        codes_before, codes_after = jax.tree.leaves(dirty), jax.tree.leaves((keys, values))
        results = [exact(keys), exact(values), *map(np.asarray, rest)]
        dirty = [exact(x) for x in dirty]
        for b, k in np.ndindex(batch, heads):
            at, count = (b, k), length[b, k]
            expected = [np.asarray(x[at], np.float64) for x in (*dirty, degree)]
            remainder, changed = merged(*expected, rows[at][:count], match[at], score[at], merges[b])
            assert results[3][at][: len(remainder)].tolist() == remainder
            for known, x, new in zip(squares, results[:2], new_squares, strict=True):
                if known is None:
                    assert new is None
                else:
                    now = np.where(np.isin(np.arange(slots), changed), np.sum(x[at] ** 2, axis=-1), known[at])
                    np.testing.assert_allclose(new[at], now, rtol=1e-5, equal_nan=True)
            np.testing.assert_array_equal(results[2][at], expected[2])
            same = np.setdiff1d(np.arange(slots), changed)
            for x, before in zip(codes_after, codes_before, strict=True):
                np.testing.assert_array_equal(*(np.asarray(y[at], np.float64)[same] for y in (x, before)))
            for x, mean in zip(results[:2], expected[:2], strict=True):
                if isinstance(dtype, str):
                    in_basis_of_codes(x[at][changed], mean[changed], dtype)
                else:
                    near(x[at][changed], mean[changed], tolerance(dtype), axes=(0, 1))

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.sampled_from([0, 1, 1000]),
        lengths(batch, heads, listed, chunk, listed),
        st.sampled_from([1.0, 0.4, 0.0]),
        st.sampled_from([0, 9]),
        st.sampled_from([1, 3, chunk]),
    )


def in_basis_of_codes(rows, expected, name):
    """Every number of merged rows is as near as its codes allow."""
    if name == "int4":
        rows, expected = (np.asarray(rotated(jnp.asarray(x, jnp.float32))) for x in (rows, expected))
    largest = np.max(np.abs(expected), axis=-1, keepdims=True)
    error = np.abs(rows - expected) / np.where(largest > 0, largest, 1)
    assert np.all(error <= STEP[name]), f"{name}: error {error.max()} of the largest number, allowed {STEP[name]}"


def drawn_edges(rng, length, listed, chunk, levels, few):
    """A partner among the first few odd entries of its chunk for every even one, and scores of few or many values."""
    a = np.arange(0, listed, 2)
    end = np.minimum(a // chunk * chunk + chunk, length[..., None])
    choices = (end - a // chunk * chunk) // 2
    match = a // chunk * chunk + 2 * rng.integers(0, np.clip(choices, 1, few)) + 1
    none = (a >= length[..., None]) | (choices == 0)
    score = np.round(rng.normal(size=match.shape) * levels) / max(levels, 1)
    return np.where(none, -1, match), np.where(none, -np.inf, score)


def merged(keys, values, degree, rows, match, score, merges):
    """What is left of the list, and the slots that changed, in place: every b row the mean of its a rows and itself."""
    best = [2 * i for i in np.argsort(-score, kind="stable")[:merges]]
    changed = sorted({rows[match[a // 2]] for a in best})
    for slot in changed:
        parts = [slot, *(rows[a] for a in best if rows[match[a // 2]] == slot)]
        for x in (keys, values):
            x[slot] = np.average(x[parts], axis=0, weights=degree[parts])
        degree[slot] = degree[parts].sum()
    return [row for i, row in enumerate(rows.tolist()) if i not in best], changed


def merge_of_equal_degrees(keys, values, degree, *rest, chunk):
    *means, _, rows, squares = reference.row_merge(keys, values, jnp.ones_like(degree), *rest, chunk=chunk)
    return *means, reference.row_merge(keys, values, degree, *rest, chunk=chunk)[2], rows, squares


def merge_that_forgets_squares(*operands, chunk):
    """Those of rows that have changed."""
    return *reference.row_merge(*operands, chunk=chunk)[:4], operands[-1]


def merge_in_old_scales(keys, values, *rest, chunk):
    """The codes of a mean, without its scale."""
    new = reference.row_merge(keys, values, *rest, chunk=chunk)
    if not isinstance(keys, Quantised):
        return new
    return *(Quantised(x.codes, old.scales) for x, old in zip(new, (keys, values), strict=False)), *new[2:]


wrong = partial(changed, reference.row_merge)
CHECKS = [check_row_merge]
BROKEN = {
    check_row_merge: [
        merge_of_equal_degrees,
        wrong(
            "of_the_last_of_equal_edges",
            score=lambda a: a.score + 1e-4 * jax.lax.broadcasted_iota(jnp.float32, a.score.shape, 2),
        ),
        wrong("with_every_fourth_row", match=lambda a: a.match // 4 * 4 + 1),
        merge_in_old_scales,
        merge_that_forgets_squares,
    ]
}
