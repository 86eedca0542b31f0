"""Rows in their place among those of other layers: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.place_rows import pallas_gpu, place_rows, reference
from tests.kernels.base import changed, compiled, drawn, lengths, normal, poisoned

BACKENDS = {"xla": reference.place_rows, "gpu": partial(pallas_gpu.place_rows, interpret=True)}
LAYERS, BATCH, HEADS, TOKENS, WIDTH = 3, 2, 3, 37, 24


def check_place(implementation, *, examples=8):
    """Other places keep what they hold; what lies beyond a prompt may be anything, and becomes zeros."""
    run = compiled(implementation)

    def check(seed, place, length, dtype):
        held = np.asarray(normal(seed, LAYERS, BATCH, HEADS, TOKENS, WIDTH), dtype)
        squares = np.asarray(normal(seed + 1, LAYERS, BATCH, HEADS, TOKENS), np.float32)
        rows = np.asarray(normal(seed + 2, BATCH, HEADS, TOKENS, WIDTH), dtype)
        outside = np.broadcast_to(np.arange(TOKENS) >= length[:, :, None], (BATCH, HEADS, TOKENS))
        new, sums = run(held, squares, poisoned(rows, outside), length[:, 0], np.int32(place))
        assert (new.dtype, sums.dtype) == (dtype, jnp.float32)
        expected = np.where(outside[..., None], 0, rows).astype(dtype)
        others = np.delete(np.arange(LAYERS), place)
        np.testing.assert_array_equal(np.asarray(new)[place], expected)
        np.testing.assert_array_equal(np.asarray(new)[others], held[others])
        np.testing.assert_allclose(sums[place], np.sum(np.square(expected.astype(np.float64)), axis=-1), rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(sums)[others], squares[others])

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.integers(0, LAYERS - 1),
        lengths(BATCH, 1, TOKENS, TOKENS),
        st.sampled_from([jnp.float32, jnp.bfloat16]),
    )


def place_without_squares(held, squares, rows, length, place):
    return reference.place_rows(held, squares, rows, length, place)[0], squares


wrong = partial(changed, reference.place_rows)
CHECKS = [check_place]
BROKEN = {
    check_place: [
        wrong("of_padding", lengths=lambda a: jnp.full_like(a.lengths, TOKENS)),
        place_without_squares,
        wrong("in_the_first", place=lambda a: jnp.zeros_like(a.place)),
    ]
}


def test_what_no_backend_can_serve_is_named():
    rows = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        place_rows(rows[None], rows[None, ..., 0], rows, jnp.asarray([4]), jnp.int32(0), backend="cuda")
