"""Rows by index: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.gather_rows import gather_rows, pallas_gpu, reference
from tests.kernels.base import changed, compiled, drawn, normal

BACKENDS = {
    "xla": reference.gather_rows,
    "gpu": partial(pallas_gpu.gather_rows, in_place_heads=1, interpret=True),
    "gpu, by parts": partial(pallas_gpu.gather_rows, least_part=1, interpret=True),
}


def check_gather(implementation, *, examples=6):
    run = compiled(implementation)

    def row_of(source, at, number):
        return source[(*at[:2], number)] if 0 <= number < source.shape[2] else None

    def check(seed, rows, places, dtype):
        source, near = (np.asarray(normal(seed + i, 2, 3, n, 24), dtype) for i, n in enumerate((20, 5)))
        rows, places = (np.asarray(x, np.int32).reshape(2, 3, 4) for x in (rows, places))
        far, both = run(source, rows), run(source, rows, near, places)
        assert far.dtype == both.dtype == dtype
        far, both, none = np.asarray(far), np.asarray(both), np.zeros(24, dtype)
        for at in np.ndindex(rows.shape):
            there, here = row_of(source, at, rows[at]), row_of(near, at, places[at])
            there = none if there is None else there
            np.testing.assert_array_equal(far[at], there)
            np.testing.assert_array_equal(both[at], there if here is None else here)

    row, place = st.sampled_from([-1, 0, 1, 18, 19, 20]), st.sampled_from([-1, 0, 4, 5])
    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.lists(row, min_size=24, max_size=24),
        st.lists(place, min_size=24, max_size=24),
        st.sampled_from([jnp.float32, jnp.bfloat16]),
    )


def check_moves(implementation, *, examples=6):
    """Rows move up where they lie: lists that increase, whose rows stand at their place or behind it, and then none."""
    run = compiled(partial(implementation, in_place=True))

    def check(seed, gone, dtype):
        source = np.asarray(normal(seed, 2, 3, 70, 24) * 100, dtype)
        rows = np.full((2, 3, 70), -1, np.int32)
        stays = np.random.default_rng(seed).random(rows.shape) >= gone
        for at in np.ndindex(2, 3):
            left = np.flatnonzero(stays[at])
            rows[at][: len(left)] = left
        moved = run(source, rows)
        assert moved.dtype == dtype
        for at in np.ndindex(2, 3):
            left = source[at][stays[at]]
            np.testing.assert_array_equal(np.asarray(moved)[at][: len(left)], left)
            np.testing.assert_array_equal(np.asarray(moved)[at][len(left) :], np.zeros((), dtype))

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]),
    )


def move_of_what_was_written(source, rows, *, in_place):
    """Reads a tile after it is overwritten."""
    first = source.at[:, :, :16].set(reference.gather_rows(source, rows[:, :, :16]))
    rest = reference.gather_rows(first, jnp.maximum(rows[:, :, 16:] - 8, -1))
    return jnp.concatenate([first[:, :, :16], rest], axis=2)


def move_that_keeps_the_rest(source, rows, *, in_place):
    return jnp.where((rows < 0)[..., None], source, reference.gather_rows(source, rows))


wrong = partial(changed, reference.gather_rows)
CHECKS = [check_gather, check_moves]
BROKEN = {
    check_moves: [move_of_what_was_written, move_that_keeps_the_rest],
    check_gather: [
        wrong("of_the_last_row_for_none", rows=lambda a: a.rows % a.source.shape[2]),
        wrong("of_what_is_near_first", place=lambda a: None if a.place is None else abs(a.place)),
    ],
}


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        gather_rows(features, jnp.zeros((1, 1, 2), jnp.int32), backend="cuda")
