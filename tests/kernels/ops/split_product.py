"""A product in parts: checks, backends, broken variants, derivatives."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from clusterkv_jax.kernels.split_product import pallas_gpu, reference, split_product
from tests.kernels.base import compiled, near, normal

BACKENDS = {
    "xla": reference.split_product,
    "gpu": partial(pallas_gpu.split_product, sizes={"block": 32, "depth": 32}, interpret=True),
}

# inputs, outputs, parts, dtype
PRODUCT_SHAPES = [(192, 96, 3, jnp.bfloat16), (128, 16, 1, jnp.float32), (256, 64, 4, jnp.float16)]


def operands(seed, inputs, outputs, dtype):
    return [jnp.asarray(part, dtype) for part in (normal(seed, inputs), normal(seed + 1, inputs, outputs))]


def check_product(implementation, *, examples=3):
    for inputs, outputs, parts, dtype in PRODUCT_SHAPES:
        run = compiled(partial(implementation, parts=parts))
        for seed in range(examples):
            x, weights = operands(seed, inputs, outputs, dtype)
            result = run(x, weights)
            assert (result.dtype, result.shape) == (jnp.float32, (parts, outputs))
            exact = np.asarray(x, np.float64)[:, None] * np.asarray(weights, np.float64)
            near(result, exact.reshape(parts, -1, outputs).sum(axis=1), 1e-5, axes=1)


def parts_in_turns(x, weights, *, parts):
    """Every so manieth input instead of neighbours."""
    turn = lambda y: jnp.swapaxes(y.reshape(-1, parts, *y.shape[1:]), 0, 1).reshape(y.shape)  # noqa: E731
    return reference.split_product(turn(x), turn(weights), parts=parts)


def parts_rounded(x, weights, *, parts):
    return reference.split_product(x, weights, parts=parts).astype(jnp.bfloat16).astype(jnp.float32)


def without_the_last_input(x, weights, *, parts):
    return reference.split_product(x.at[-1].set(0), weights, parts=parts)


CHECKS = [check_product]
BROKEN = {check_product: [parts_in_turns, parts_rounded, without_the_last_input]}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_a_split_product_has_derivatives(op):
    check_grads(partial(op, parts=2), operands(0, 64, 32, jnp.float32), order=1, modes=("fwd", "rev"), rtol=1e-2)


@pytest.mark.parametrize("parts", [0, 3])
def test_parts_must_divide_the_inputs(parts):
    with pytest.raises(ValueError, match=f"parts must divide the 64 inputs, got {parts}"):
        split_product(*operands(0, 64, 16, jnp.float32), parts=parts)


@pytest.mark.parametrize(("inputs", "outputs", "parts"), [(64, 24, 2), (64, 32, 8), (96, 32, 4)])
def test_the_kernel_refuses_what_fills_no_block(inputs, outputs, parts):
    with pytest.raises(NotImplementedError, match=f"blocks of 16, got {outputs} and {parts} parts of {inputs}"):
        pallas_gpu.split_product(*operands(0, inputs, outputs, jnp.float32), parts=parts, interpret=True)
