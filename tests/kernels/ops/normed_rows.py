"""Rows normalised after a sum: checks, backends, broken variants, derivatives."""

import itertools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference
from tests.kernels.base import compiled, near, normal, tolerance

BACKENDS = {"xla": reference.normed_rows, "gpu": partial(pallas_gpu.normed_rows, interpret=True)}

# tokens, width, dtype
ROW_SHAPES = [(1, 256, jnp.bfloat16), (2, 72, jnp.float32)]
OPTIONS = {"eps": 0.25, "offset": 1.0}


def operands(seed, tokens, width, dtype, parts=1):
    """Parts of what is added are float32 where there are several."""
    x, added = normal(seed, tokens, width), 2 * normal(seed + 10, parts, tokens, width)
    scale = 0.3 * normal(seed + 20, width)
    return jnp.asarray(x, dtype), jnp.asarray(added, dtype if parts == 1 else jnp.float32), jnp.asarray(scale, dtype)


def check_rows(implementation, *, examples=3):
    for tokens, width, dtype in ROW_SHAPES:
        run = compiled(partial(implementation, **OPTIONS))
        for seed, parts in itertools.product(range(examples), (0, 1, 3)):
            x, added, scale = operands(seed, tokens, width, dtype, max(parts, 1))
            total, normed, products = run(x, added if parts else None, scale)
            assert products is None
            assert (total.dtype, normed.dtype, normed.shape) == (dtype, dtype, (tokens, width))
            y = np.asarray(x, np.float64) + (np.asarray(added, np.float64).sum(axis=0) if parts else 0)
            near(total, y, tolerance(dtype), axes=1)
            y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 0.25) * (1 + np.asarray(scale, np.float64))
            near(normed, y, tolerance(dtype), axes=1)


def check_products(implementation, *, examples=2):
    """Of the rows as they are rounded, with weights whose number no block divides; rows are as without them."""
    for tokens, width, dtype in ROW_SHAPES:
        for seed in range(examples):
            weights = jnp.asarray(normal(seed + 30, 11, width), dtype)
            run = compiled(partial(implementation, **OPTIONS))
            x, added, scale = operands(seed, tokens, width, dtype)
            for more in (None, added):
                total, normed, products = run(x, more, scale, weights)
                assert (products.dtype, products.shape) == (jnp.float32, (tokens, 11))
                exact = np.asarray(normed, np.float64) @ np.asarray(weights, np.float64).T
                near(products, exact, tolerance(jnp.float32), axes=1)
                for got, want in zip((total, normed), run(x, more, scale)[:2], strict=True):
                    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def rows_before_the_sum(x, added, scale, **options):
    total, *_ = reference.normed_rows(x, added, scale, **options)
    return total, *reference.normed_rows(x, None, scale, **options)[1:]


def rows_of_one_part(x, added, scale, **options):
    return reference.normed_rows(x, None if added is None else added[:1], scale, **options)


def rows_all_alike(x, added, scale, **options):
    total, normed, products = reference.normed_rows(x, added, scale, **options)
    return total, jnp.broadcast_to(normed[:1], normed.shape), products


def rows_without_eps(*args, eps, **options):
    return reference.normed_rows(*args, eps=0.0, **options)


def products_before_the_norm(x, added, scale, weights=None, **options):
    total, normed, products = reference.normed_rows(x, added, scale, **options)
    return total, normed, products if weights is None else total.astype(jnp.float32) @ weights.T.astype(jnp.float32)


def products_rounded(*args, **options):
    *rows, products = reference.normed_rows(*args, **options)
    return *rows, products if products is None else products.astype(jnp.bfloat16).astype(jnp.float32)


CHECKS = [check_rows, check_products]
BROKEN = {
    check_rows: [rows_before_the_sum, rows_of_one_part, rows_all_alike, rows_without_eps],
    check_products: [products_before_the_norm, products_rounded],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("added", [False, True])
def test_normed_rows_have_derivatives(op, added):
    x, more, scale = operands(0, 1, 8, jnp.float32)
    weights = jnp.asarray(normal(30, 3, 8))
    run = partial(op, **OPTIONS)
    with_sum = lambda x, more, scale, weights: run(x, more if added else None, scale, weights)  # noqa: E731
    check_grads(with_sum, (x, more, scale, weights), order=1, rtol=1e-2)
