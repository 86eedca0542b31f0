"""Products of few rows: checks, backends, broken variants, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.row_products import pallas_gpu, reference, row_products
from tests.kernels.base import changed, compiled, near, normal, tolerance

BACKENDS = {
    "xla": reference.row_products,
    "gpu": partial(pallas_gpu.row_products, sizes={"block": 32, "depth": 32}, interpret=True),
}

# rows, inputs, outputs, dtype
SHAPES = [(1, 96, 64, jnp.bfloat16), (5, 64, 48, jnp.float16), (16, 32, 16, jnp.bfloat16)]


def operands(seed, rows, inputs, outputs, dtype):
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs), (inputs, outputs)
    return [jnp.asarray(normal(seed + 10 * i, *shape), dtype) for i, shape in enumerate(shapes)]


def exact(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def check_product(implementation, *, examples=2):
    """As it is, and added to others, or to a share of them."""
    whole, quarter = (compiled(partial(implementation, share=share)) for share in (1.0, 0.25))
    for *shape, dtype in SHAPES:
        for seed in range(examples):
            x, weights, onto, _ = operands(seed, *shape, dtype)
            for run, more, share in ((whole, None, 1.0), (whole, onto, 1.0), (quarter, onto, 0.25)):
                result = run(x, weights, more)
                assert (result.dtype, result.shape) == (dtype, onto.shape)
                wide_x, wide_weights, wide_onto = exact(x, weights, onto)
                expected = wide_x @ wide_weights + (0 if more is None else share * wide_onto)
                near(result, expected, tolerance(dtype), axes=1)


def check_gate(implementation, *, examples=2):
    for *shape, dtype in SHAPES:
        for gate, activation in (("silu", jax.nn.silu), ("gelu_tanh", jax.nn.gelu)):
            run = compiled(partial(implementation, gate=gate))
            for seed in range(examples):
                x, weights, _, gated = operands(seed, *shape, dtype)
                x = x / 8
                wide_x, wide_weights, wide_gated = exact(x, weights, gated)
                first = np.asarray(activation(jnp.asarray(wide_x @ wide_weights, jnp.float32)), np.float64)
                near(run(x, weights, None, gated), first * (wide_x @ wide_gated), tolerance(dtype), axes=1)


wrong = partial(changed, reference.row_products)
CHECKS = [check_product, check_gate]
BROKEN = {
    check_product: [
        wrong("without_the_last_input", x=lambda a: a.x.at[:, -1].set(0)),
        wrong("rows_all_alike", x=lambda a: jnp.broadcast_to(a.x[:1], a.x.shape)),
        wrong("added_twice", onto=lambda a: None if a.onto is None else 2 * a.onto),
        wrong("the_whole_added", share=1.0),
    ],
    check_gate: [
        wrong("without_the_last_input", x=lambda a: a.x.at[:, -1].set(0)),
        wrong("the_other_gated", weights=lambda a: a.gated, gated=lambda a: a.weights),
    ],
}


@pytest.mark.parametrize("gate", [None, "silu"])
def test_row_products_have_derivatives(gate):
    """Those of the definition, also of the kernel."""
    x, weights, onto, gated = operands(0, 2, 32, 16, jnp.bfloat16)
    sums = [
        jax.grad(lambda *args, op=op: jnp.sum(op(*args, gate=gate).astype(jnp.float32)), argnums=(0, 1, 2))
        for op in BACKENDS.values()
    ]
    for one, other in zip(*(grad(x, weights, onto, gated if gate else None) for grad in sums), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(("gate", "gated"), [("silu", False), (None, True), ("relu6", True)])
def test_a_gate_goes_with_gated_weights(gate, gated):
    x, weights, _, other = operands(0, 2, 32, 16, jnp.bfloat16)
    with pytest.raises(ValueError, match=f"gate goes with gated weights and is one of silu, gelu_tanh, got {gate!r}"):
        row_products(x, weights, None, other if gated else None, gate=gate)


@pytest.mark.parametrize("sums", [2, 4])
def test_several_sums_make_the_product_of_one(sums):
    x, weights, onto, other = operands(0, 5, 192, 32, jnp.bfloat16)
    sizes = {"block": 32, "depth": 16, "sums": sums}
    result = pallas_gpu.row_products(x, weights, onto, other, gate="silu", sizes=sizes, interpret=True)
    (expected,) = exact(reference.row_products(x, weights, onto, other, gate="silu"))
    near(result, expected, tolerance(jnp.bfloat16), axes=1)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "message"),
    [
        (17, 64, 32, jnp.bfloat16, "up to 16 rows of bfloat16 or float16, as their weights, got 17"),
        (2, 64, 32, jnp.float32, "got 2 of float32"),
        (2, 8, 32, jnp.bfloat16, "blocks of 16, got 8 and 32"),
        (2, 33, 32, jnp.bfloat16, "blocks of 16, got 33 and 32"),
        (2, 24, 32, jnp.bfloat16, "blocks of 16, got 24 and 32"),
        (2, 64, 40, jnp.bfloat16, "blocks of 16, got 64 and 40"),
    ],
)
def test_the_kernel_refuses_what_fills_no_block(rows, inputs, outputs, dtype, message):
    x, weights, *_ = operands(0, rows, inputs, outputs, dtype)
    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu.row_products(x, weights, interpret=True)
