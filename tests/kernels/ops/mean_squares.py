"""Mean squared lengths of listed rows: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from clusterkv_jax.kernels.mean_squares import pallas_gpu, reference
from tests.kernels.base import compiled, drawn, exact, lengths, near, normal, poisoned, stored

BACKENDS = {"xla": reference.mean_squares, "gpu": partial(pallas_gpu.mean_squares, interpret=True)}

# batch, heads, slots, entries of the list, width, dtype
ROW_SHAPES = [
    (2, 2, 300, 290, 20, jnp.float32),
    (1, 2, 70, 70, 64, jnp.bfloat16),
    (1, 2, 70, 60, 24, "int8"),
    (1, 2, 40, 40, 16, "int4"),
]


def check_mean_squares(implementation, *, examples=6):
    for shape in ROW_SHAPES:
        check_mean_squares_of(shape, implementation, examples)


def check_mean_squares_of(shape, implementation, examples):
    batch, heads, slots, listed, width, dtype = shape
    run = compiled(implementation)

    def check(seed, length, zeros):
        rng = np.random.default_rng(seed)
        index = np.sort(rng.permuted(np.tile(np.arange(slots), (batch, heads, 1)), axis=2)[..., :listed])
        used = np.zeros((batch, heads, slots), bool)
        for at in np.ndindex(batch, heads):
            used[at][index[at][: length[at]]] = True
        x = stored(normal(seed, batch, heads, slots, width) * (not zeros), dtype)
        mean = run(poisoned(x, ~used), jnp.asarray(index, jnp.int32), jnp.asarray(length))
        assert mean.dtype == jnp.float32
        square = np.sum(exact(x) ** 2, axis=-1)
        expected = [np.mean(square[at][used[at]]) if used[at].any() else 0.0 for at in np.ndindex(batch, heads)]
        expected = np.asarray([mean if mean > 0 else 1.0 for mean in expected]).reshape(batch, heads)
        near(mean, expected, 1e-6, axes=1)

    drawn(check, examples, st.integers(0, 2**16), lengths(batch, heads, listed, 128), st.booleans())


def squares_of_all_rows(rows, index, length):
    """Also of those that the list no longer holds."""
    return reference.mean_squares(rows, index, jnp.full_like(length, index.shape[2]))


def squares_by_sequence(rows, index, length):
    mean = reference.mean_squares(rows, index, length)
    return jnp.broadcast_to(mean[:, :1], mean.shape)


def squares_that_may_be_zero(rows, index, length):
    mean = reference.mean_squares(rows, index, length)
    return jnp.where(length > 0, mean, 0.0)


CHECKS = [check_mean_squares]
BROKEN = {check_mean_squares: [squares_of_all_rows, squares_by_sequence, squares_that_may_be_zero]}
