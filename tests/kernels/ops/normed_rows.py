"""Rows normalised after a sum: checks, backends, broken variants, derivatives."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference
from tests.kernels.base import compiled, near, normal, tolerance

BACKENDS = {"xla": reference.normed_rows, "gpu": partial(pallas_gpu.normed_rows, interpret=True)}

# tokens, width, rows, dtype
ROW_SHAPES = [(1, 256, 3, jnp.bfloat16), (2, 72, 2, jnp.float32)]
OPTIONS = {"eps": 0.25, "offset": 1.0}


def operands(seed, tokens, width, dtype):
    x, added, scale = normal(seed, tokens, width), 2 * normal(seed + 10, 3, width), 0.3 * normal(seed + 20, width)
    return [jnp.asarray(part, dtype) for part in (x, added, scale)]


def check_rows(implementation, *, examples=3):
    for tokens, width, rows, dtype in ROW_SHAPES:
        for seed in range(examples):
            x, added, scale = operands(seed, tokens, width, dtype)
            for more in (None, added):
                total, normed = compiled(partial(implementation, **OPTIONS, rows=rows))(x, more, scale)
                assert (total.dtype, normed.dtype, normed.shape) == (dtype, dtype, (rows, width))
                y = np.asarray(x if more is None else x + more[:tokens], np.float64)
                near(total, y, tolerance(dtype), axes=1)
                assert not np.asarray(normed[tokens:], np.float32).any()
                y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 0.25) * (1 + np.asarray(scale, np.float64))
                near(normed[:tokens], y, tolerance(dtype), axes=1)


def rows_before_the_sum(x, added, scale, **options):
    total, _ = reference.normed_rows(x, added, scale, **options)
    return total, reference.normed_rows(x, None, scale, **options)[1]


def rows_all_alike(x, added, scale, **options):
    total, normed = reference.normed_rows(x, added, scale, **options)
    return total, jnp.broadcast_to(normed[:1], normed.shape)


def rows_without_eps(*args, eps, **options):
    return reference.normed_rows(*args, eps=0.0, **options)


CHECKS = [check_rows]
BROKEN = {check_rows: [rows_before_the_sum, rows_all_alike, rows_without_eps]}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("added", [False, True])
def test_normed_rows_have_derivatives(op, added):
    x, more, scale = operands(0, 1, 8, jnp.float32)
    run = partial(op, **OPTIONS, rows=2)
    check_grads(lambda x, more, scale: run(x, more if added else None, scale), (x, more, scale), order=1, rtol=1e-2)
