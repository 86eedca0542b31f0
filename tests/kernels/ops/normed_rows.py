"""Normalised rows: checks, backends, broken variants, derivatives."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference
from tests.kernels.base import changed, compiled, near, normal, tolerance

BACKENDS = {"xla": reference.normed_rows, "gpu": partial(pallas_gpu.normed_rows, interpret=True)}

# tokens, width, dtype
ROW_SHAPES = [(1, 256, jnp.bfloat16), (2, 72, jnp.float32)]
OPTIONS = {"eps": 0.25, "offset": 1.0}


def operands(seed, tokens, width, dtype):
    return jnp.asarray(normal(seed, tokens, width), dtype), jnp.asarray(0.3 * normal(seed + 20, width), dtype)


def check_rows(implementation, *, examples=3):
    run = compiled(partial(implementation, **OPTIONS))
    for tokens, width, dtype in ROW_SHAPES:
        for seed in range(examples):
            x, scale = operands(seed, tokens, width, dtype)
            normed, products = run(x, scale)
            assert products is None
            assert (normed.dtype, normed.shape) == (dtype, (tokens, width))
            y = np.asarray(x, np.float64)
            y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 0.25) * (1 + np.asarray(scale, np.float64))
            near(normed, y, tolerance(dtype), axes=1)


def check_products(implementation, *, examples=2):
    """Of the rows as they are rounded, with weights whose number no block divides; rows are as without them."""
    run = compiled(partial(implementation, **OPTIONS))
    for tokens, width, dtype in ROW_SHAPES:
        for seed in range(examples):
            weights = jnp.asarray(normal(seed + 30, 11, width), dtype)
            x, scale = operands(seed, tokens, width, dtype)
            normed, products = run(x, scale, weights)
            assert (products.dtype, products.shape) == (jnp.float32, (tokens, 11))
            exact = np.asarray(normed, np.float64) @ np.asarray(weights, np.float64).T
            near(products, exact, tolerance(jnp.float32), axes=1)
            alone = np.asarray(run(x, scale)[0], np.float32)
            np.testing.assert_array_equal(np.asarray(normed, np.float32), alone)


def rows_all_alike(x, scale, weights=None, **options):
    normed, products = reference.normed_rows(x, scale, weights, **options)
    return jnp.broadcast_to(normed[:1], normed.shape), products


def products_before_the_norm(x, scale, weights=None, **options):
    normed, products = reference.normed_rows(x, scale, weights, **options)
    return normed, products if weights is None else x.astype(jnp.float32) @ weights.T.astype(jnp.float32)


def products_rounded(*args, **options):
    normed, products = reference.normed_rows(*args, **options)
    return normed, products if products is None else products.astype(jnp.bfloat16).astype(jnp.float32)


wrong = partial(changed, reference.normed_rows)
CHECKS = [check_rows, check_products]
BROKEN = {
    check_rows: [rows_all_alike, wrong("rows_without_eps", eps=0.0), wrong("rows_without_offset", offset=0.0)],
    check_products: [products_before_the_norm, products_rounded],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_normed_rows_have_derivatives(op):
    x, scale = operands(0, 1, 8, jnp.float32)
    weights = jnp.asarray(normal(30, 3, 8))
    check_grads(partial(op, **OPTIONS), (x, scale, weights), order=1, rtol=1e-2)
