"""Products with weights in codes: checks, backends, broken variants."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from clusterkv_jax.kernels import weight_codes
from clusterkv_jax.kernels.quantised_linear import by_halves, one_row_cpu, pallas_gpu, quantised_linear, reference
from clusterkv_jax.kernels.weight_codes import QuantisedWeights, dequantised
from clusterkv_jax.runtime.dispatch import LeftToXLA
from tests.kernels.base import compiled, near, normal, tolerance

SMALL = {"block": 32, "depth": 32, "step": 64, "splits": 2}
BACKENDS = {
    "quantised_linear": {"xla": reference.quantised_linear, "by halves": by_halves.quantised_linear},
    "quantised_linear of few rows": {
        "xla": reference.quantised_linear,
        "gpu": partial(pallas_gpu.quantised_linear, sizes=SMALL, interpret=True),
    },
    "quantised_linear of one row": {"xla": reference.quantised_linear, "cpu": one_row_cpu.quantised_linear},
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

# kind, rows, inputs, groups, outputs, whether there are offsets, the type of rows. The last two have several tiles.
SHAPES = [
    ("int8", 1, 96, 1, 48, False, jnp.float32),
    ("int8", 3, 64, 2, 48, True, jnp.bfloat16),
    ("int4", 1, 128, 2, 64, True, jnp.float32),
    ("int4", 16, 128, 4, 32, False, jnp.bfloat16),
    ("fp8", 2, 96, 3, 48, False, jnp.float32),
    ("mxfp4", 2, 96, 3, 48, False, jnp.float32),
    ("int4", 1, 1024, 8, 301, True, jnp.float32),
    ("int8", 2, 1024, 1, 301, True, jnp.float32),
]

# Of few rows in blocks: groups in several steps and in one, or outputs that share none, with both halves of a byte.
FEW_ROWS = [
    ("int8", 1, 192, 1, 64, False, jnp.bfloat16),
    ("int8", 3, 128, 2, 96, True, jnp.bfloat16),
    ("int4", 16, 256, 8, 32, True, jnp.bfloat16),
    ("int4", 2, 128, 1, 32, True, jnp.bfloat16),
    ("fp8", 5, 96, 3, 32, False, jnp.bfloat16),
    ("mxfp4", 1, 256, 8, 64, False, jnp.bfloat16),
]

# Sums of a group that are several and one, a group of all inputs, and outputs that fill no vector.
ONE_ROW = [
    ("int4", 1, 128, 2, 64, True, jnp.float32),
    ("int4", 1, 96, 6, 43, False, jnp.bfloat16),
    ("int8", 1, 96, 1, 48, False, jnp.float32),
    ("int8", 1, 64, 2, 48, True, jnp.bfloat16),
]


def operands(seed, kind, rows, inputs, groups, outputs, offsets, dtype):
    """Rows, codes, and the numbers that these stand for by a formula of its own."""
    draw = np.random.default_rng(seed)
    x = jnp.asarray(normal(seed, rows, inputs), dtype)
    scales = draw.uniform(0.01, 0.05, (groups, outputs)).astype(np.float16)
    spread = np.repeat(scales.astype(np.float64), inputs // groups, axis=0)
    if kind == "int8":
        codes = numbers = draw.integers(-128, 128, (inputs, outputs)).astype(np.int8)
    elif kind == "fp8":
        codes = numbers = draw.normal(size=(inputs, outputs)).astype(ml_dtypes.float8_e4m3fn)
    else:
        each = draw.integers(0, 16, (groups, 2, inputs // groups // 2, outputs)).astype(np.uint8)
        numbers = (E2M1[each] if kind == "mxfp4" else each.astype(np.int32) - 8).reshape(inputs, outputs)
        codes = (each[:, 0] | each[:, 1] << 4).reshape(inputs // 2, outputs)
    if kind == "mxfp4":
        scales = draw.integers(118, 124, (groups, outputs)).astype(np.uint8)
        spread = np.repeat(2.0 ** (scales.astype(np.float64) - 127), inputs // groups, axis=0)
    more = draw.normal(size=(groups, outputs)).astype(np.float16) if offsets else None
    wide = numbers.astype(np.float64) * spread
    if more is not None:
        wide = wide + np.repeat(more.astype(np.float64), inputs // groups, axis=0)
    names = {"shape": (inputs, outputs), "axes": (0,), "names": ("model", "mlp")}
    parts = (jnp.asarray(codes), jnp.asarray(scales), None if more is None else jnp.asarray(more))
    return x, QuantisedWeights(*parts, kind=kind, **names), wide


def check_product(implementation, *, examples=2, shapes=SHAPES):
    run = compiled(implementation)
    for shape in shapes:
        for seed in range(examples):
            x, weights, numbers = operands(seed, *shape)
            (y,) = run(x, weights)
            assert (y.dtype, y.shape) == (jnp.float32, (x.shape[0], numbers.shape[1]))
            near(y, np.asarray(x, np.float64) @ numbers, tolerance(x.dtype), axes=1)


def check_few_rows(implementation, *, examples=2):
    check_product(implementation, examples=examples, shapes=FEW_ROWS)


def check_one_row(implementation, *, examples=2):
    check_product(implementation, examples=examples, shapes=ONE_ROW)


def halves_the_other_way_round(x, weights):
    if weights.codes.dtype == jnp.uint8:
        weights = replace(weights, codes=weights.codes << 4 | weights.codes >> 4)
    return reference.quantised_linear(x, weights)


def scales_of_the_first_group(x, weights):
    first = jnp.broadcast_to(weights.scales[:1], weights.scales.shape)
    return reference.quantised_linear(x, replace(weights, scales=first))


def without_offsets(x, weights):
    return reference.quantised_linear(x, replace(weights, offsets=None))


def without_the_last_output(x, weights):
    return [reference.quantised_linear(x, weights)[0].at[:, -1].set(0)]


def even_outputs_for_odd_ones(x, weights):
    (y,) = reference.quantised_linear(x, weights)
    return [y.reshape(len(x), -1, 2)[:, :, ::-1].reshape(y.shape)]


def without_the_last_step(x, weights):
    return reference.quantised_linear(x.at[:, -16:].set(0), weights)


WRONG = [halves_the_other_way_round, scales_of_the_first_group, without_offsets, without_the_last_output]
CHECKS = {
    "quantised_linear": [check_product],
    "quantised_linear of few rows": [check_few_rows],
    "quantised_linear of one row": [check_one_row],
}
BROKEN = {
    check_product: WRONG,
    check_few_rows: [*WRONG, even_outputs_for_odd_ones, without_the_last_step],
    check_one_row: [*WRONG, without_the_last_step],
}


@pytest.mark.parametrize("shape", SHAPES[:6])
def test_dequantised_weights_are_the_numbers_that_codes_stand_for(shape):
    _, weights, numbers = operands(0, *shape)
    np.testing.assert_allclose(dequantised(weights), numbers, rtol=1e-6)


@pytest.mark.parametrize("on", ["cpu", "tpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_some_outputs_are_those_of_all(monkeypatch, shape, on):
    """On a TPU by tiles, of which the last one reaches over the one before it."""
    monkeypatch.setattr(weight_codes, "platform", lambda: on)
    _, weights, numbers = operands(0, *shape)
    outputs = numbers.shape[1]
    ids = jnp.asarray([[0, outputs - 1, outputs // 2], [7, 7, outputs - 2]])
    found = jax.jit(weight_codes.output_numbers, static_argnums=2)(weights, ids, jnp.float32)
    np.testing.assert_allclose(found, numbers.T[ids], rtol=1e-6)


def test_codes_of_heads_have_the_shape_of_their_parameter():
    """Inputs that come last, or first and in two dimensions."""
    _, weights, numbers = operands(0, "int4", 1, 64, 2, 48, True, jnp.float32)
    q = replace(weights, shape=(6, 8, 64), axes=(2,), names=("heads", "head_dim", "model"))
    o = replace(weights, shape=(8, 8, 48), axes=(0, 1), names=("heads", "head_dim", "model"))
    np.testing.assert_allclose(dequantised(q), numbers.T.reshape(6, 8, 64), rtol=1e-6)
    np.testing.assert_allclose(dequantised(o), numbers.reshape(8, 8, 48), rtol=1e-6)


def test_no_program_holds_the_weights_as_numbers():
    """Of few rows a tile, of one row sums of 16 inputs; nor does a loop over tokens hold what it could take out."""
    x, weights, _ = operands(0, "int4", 2, 1024, 8, 301, True, jnp.float32)

    def tokens(x, weights):
        return jax.lax.fori_loop(0, 4, lambda _, y: y + quantised_linear(x + y[:, :1], weights)[0], jnp.zeros((1, 301)))

    text = jax.jit(quantised_linear).lower(x, weights).compile().as_text() or ""
    assert "[1024,101]" in text  # a tile
    of_one = jax.jit(tokens).lower(x[:1], weights).compile()
    assert of_one.memory_analysis().temp_size_in_bytes < 2 * 4 * 64 * 301
    text += of_one.as_text() or ""
    assert not any(f"{name},301]" in text for name in ("f32[512", "f32[1024", "f32[2,512", "f32[8,128", "f32[8,64"))


@pytest.mark.parametrize("shape", [("fp8", 1, 96, 3, 48), ("int8", 2, 96, 3, 48), ("int8", 1, 96, 8, 48)])
def test_other_products_of_a_cpu_are_left_to_xla(shape):
    x, weights, _ = operands(0, *shape, False, jnp.float32)
    with pytest.raises(LeftToXLA):
        one_row_cpu.quantised_linear(x, weights)


def test_rows_of_another_width_are_refused():
    x, weights, _ = operands(0, "int4", 1, 64, 2, 48, True, jnp.float32)
    with pytest.raises(ValueError, match=r"takes rows \[n, 64\]"):
        quantised_linear(x[:, :32], weights)


def test_rows_are_multiplied_with_several_weights_in_a_launch():
    """Of other kinds, groups and outputs."""
    shapes = [("int4", 3, 192, 6, 96, True), ("int8", 3, 192, 1, 32, False), ("mxfp4", 3, 192, 6, 64, False)]
    x, *_ = operands(0, *shapes[0], jnp.bfloat16)
    drawn = [operands(seed, *shape, jnp.bfloat16)[1:] for seed, shape in enumerate(shapes)]
    weights, expected = zip(*drawn, strict=True)
    run = compiled(partial(pallas_gpu.quantised_linear, sizes=SMALL, interpret=True))
    for y, numbers in zip(run(x, *weights), expected, strict=True):
        near(y, np.asarray(x, np.float64) @ numbers, tolerance(x.dtype), axes=1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("int8", 1, 64, 1, 32, False, jnp.float32), "rows of bfloat16, got float32"),
        (("int8", 1, 64, 1, 48, False, jnp.bfloat16), "blocks of 32 and groups of 16 to 256 rows .* got 48 and 64"),
        (("int4", 1, 96, 2, 32, False, jnp.bfloat16), "a power of two, got 32 and 24"),
        (("int8", 1, 1024, 2, 32, False, jnp.bfloat16), "got 32 and 512"),
    ],
)
def test_the_kernel_refuses_what_fills_no_block(shape, message):
    x, weights, _ = operands(0, *shape)
    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu.quantised_linear(x, weights, interpret=True)


def test_many_rows_are_multiplied_with_a_matrix_in_numbers():
    x, weights, numbers = operands(0, "int4", 40, 256, 8, 32, True, jnp.bfloat16)
    (y,) = pallas_gpu.quantised_linear(x, weights, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    near(y, np.asarray(x, np.float64) @ numbers, tolerance(x.dtype), axes=1)


@pytest.mark.parametrize("shape", [FEW_ROWS[0], FEW_ROWS[2], FEW_ROWS[5]])
def test_rows_go_through_their_experts(shape):
    """Two of each row, by both backends."""
    kind, _, *rest = shape
    drawn = [operands(seed, kind, 2, *rest) for seed in range(3)]
    x, numbers = drawn[0][0], [part[2] for part in drawn]
    weights = jax.tree.map(lambda *parts: jnp.stack(parts), *(part[1] for part in drawn))
    owners = jnp.asarray([2, 0, 1, 1], jnp.int32)
    expected = [np.asarray(x, np.float64)[row // 2] @ numbers[own] for row, own in enumerate(owners.tolist())]
    gpu = partial(pallas_gpu.quantised_experts, sizes=SMALL, interpret=True)
    for run in (gpu, reference.quantised_experts):
        (y,) = compiled(run)(x, owners, weights)
        near(y, np.stack(expected), tolerance(x.dtype), axes=1)
