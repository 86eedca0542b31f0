"""A token behind attention through a layer of experts: checks, backends, broken variants, derivatives."""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.expert_block import pallas_gpu, reference
from clusterkv_jax.kernels.expert_block.plan import COLUMNS, GATED, PROGRAMS, ROWS, SLOTS, TRIED
from clusterkv_jax.kernels.expert_block.tiles import gate_block
from clusterkv_jax.kernels.splits import COUNTERS, Splits
from tests.kernels.base import compiled, near, normal
from tests.support import hopper_lowering as hopper

# The kernel is one of a Hopper GPU alone: programs that wait for each other are nothing for an interpreter.
BACKENDS = {"xla": reference.expert_block}
TOLERANCE = 2e-2  # of bfloat16 numbers, four products one after the other

# KV heads, splits, query heads of each, head dim, width, experts, units, experts of a token. The second one is what the
# kernel takes, Qwen3-30B-A3B's.
SHAPES = [(2, 3, 4, 16, 64, 24, 32, 3), (4, 128, 8, 128, 2048, 128, 768, 8)]
OPTIONS = {"normalize": True, "eps": 1e-6, "offset": 0.0}


def _shape():
    return SHAPES[0 if jax.default_backend() == "cpu" else 1]


def operands(seed, shape, filled):
    """What empty splits have is NaN. Every eighth expert has the same weights: to draw them all would take long."""
    kv_heads, count, queries, dim, width, experts, units, _ = shape
    bf16 = lambda i, *shape: jnp.asarray(normal(seed + i, *shape) * shape[-2] ** -0.5, jnp.bfloat16)  # noqa: E731
    parts, lses = normal(seed, kv_heads, count, queries, dim), 3 * normal(seed + 1, kv_heads, count, queries)
    filled = np.asarray([min(n, count) for n in filled[:kv_heads]], np.int32)
    empty = np.arange(count) >= filled[:, None]
    parts[empty], lses[empty] = np.nan, np.nan
    parts, lses = (jnp.asarray(x, jnp.float32) for x in (parts, lses))
    splits = Splits(parts, lses, jnp.asarray(filled), jnp.zeros(COUNTERS, jnp.int32))
    hidden, scale = bf16(2, 1, width)[0], bf16(3, 1, width)[0] / 4 + 1
    router = 4 * bf16(4, width, experts).T
    few = min(experts, 8)
    weights = (bf16(5, few, width, units), bf16(6, few, width, units), bf16(7, few, units, width))
    many = (jnp.tile(x, (-(-experts // few), 1, 1))[:experts] for x in weights)
    return splits, hidden, bf16(8, kv_heads * queries * dim, width), scale, router, *many


def exact(splits, hidden, projection, scale, router, *weights, per_token, normalize, eps, offset):
    """In float64, rounded where numbers are stored."""
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    rounded = lambda x: wide(jnp.asarray(x, jnp.bfloat16))  # noqa: E731
    attended = []
    for parts, lses, filled in zip(wide(splits.parts), wide(splits.lses), np.asarray(splits.filled), strict=True):
        shares = 2 ** (lses[:filled] - np.max(lses[:filled], axis=0, initial=-np.inf))
        mixed = np.einsum("sgd,sg->gd", parts[:filled], shares / shares.sum(axis=0)) if filled else 0 * wide(parts[0])
        attended.append(np.where(np.isnan(mixed), 0, mixed))
    hidden = rounded(wide(hidden) + rounded(rounded(np.concatenate(attended).reshape(-1)) @ wide(projection)))
    x = rounded(hidden / np.sqrt(np.mean(hidden**2) + eps) * (offset + wide(scale)))
    logits = wide(router) @ x
    best = np.argsort(-logits, kind="stable")[:per_token]
    shares = np.exp(logits - logits.max())
    shares = shares[best] / (shares[best] if normalize else shares).sum()
    # Of the chosen experts alone: to have all weights in float64 would take long.
    for share, gate, up, down in zip(shares, *(wide(x[best]) for x in weights), strict=True):
        inner = x @ gate
        hidden = hidden + share * (rounded(inner / (1 + np.exp(-inner)) * (x @ up)) @ down)
    return hidden


def check_block(implementation, *, examples=2):
    run = compiled(partial(implementation, per_token=_shape()[-1], **OPTIONS))
    for seed, filled in zip(range(examples), [(200, 1, 67, 14), (0, 2, 65, 64)] * examples, strict=False):
        args = operands(10 * seed, _shape(), filled)
        result = run(*args)
        assert result.dtype == jnp.bfloat16
        near(result, exact(*args, per_token=_shape()[-1], **OPTIONS), TOLERANCE, axes=0)


def check_options(implementation, *, examples=1):
    """Shares of all experts, and a scale that lies around 0."""
    *shape, per_token = _shape()
    args = operands(examples, (*shape, per_token), (3, 3, 3, 3))
    options = {"normalize": False, "eps": 0.5, "offset": 1.0, "per_token": per_token}
    near(compiled(partial(implementation, **options))(*args), exact(*args, **options), TOLERANCE, axes=0)


def check_equal_experts(implementation, *, examples=1):
    """Of equal logits the first experts are chosen."""
    shape = _shape()
    *args, router, gate, up, down = operands(examples, shape, (3, 3, 3, 3))
    router = jnp.where(jnp.arange(len(router))[:, None] % 5 == 1, router[:1], 0)
    args = *args, router, gate, up, down
    options = {"per_token": shape[-1], **OPTIONS}
    near(compiled(partial(implementation, **options))(*args), exact(*args, **options), TOLERANCE, axes=0)


def without_the_last_split(splits, *args, **options):
    fewer = jnp.maximum(splits.filled - 1, 0)
    return reference.expert_block(replace(splits, filled=fewer), *args, **options)


def without_what_came_in(splits, hidden, *args, **options):
    return reference.expert_block(splits, hidden, *args, **options) - hidden


def with_natural_logarithms(splits, *args, **options):
    return reference.expert_block(replace(splits, lses=splits.lses / 0.7), *args, **options)


def without_offset(*args, offset, **options):
    return reference.expert_block(*args, offset=0 * offset, **options)


def the_last_of_equal_experts(splits, hidden, projection, scale, *experts, **options):
    return reference.expert_block(splits, hidden, projection, scale, *(x[::-1] for x in experts), **options)


CHECKS = [check_block, check_options, check_equal_experts]
BROKEN = {
    check_block: [without_the_last_split, without_what_came_in, with_natural_logarithms],
    check_options: [without_offset],
    check_equal_experts: [the_last_of_equal_experts],
}


@pytest.fixture
def _for_hopper():
    with (
        mock.patch("clusterkv_jax.kernels.dispatch.device_kind", return_value="NVIDIA H200"),
        mock.patch("clusterkv_jax.kernels.expert_block.plan.multiprocessors", return_value=132),
        hopper.lowered(),
    ):
        yield


def _described(shape):
    kv_heads, count, queries, dim, width, experts, units, _ = shape
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    numbers, whole = partial(of, dtype=jnp.float32), partial(of, dtype=jnp.int32)
    parts, lses = numbers(kv_heads, count, queries, dim), numbers(kv_heads, count, queries)
    splits = Splits(parts, lses, whole(kv_heads), whole(COUNTERS))
    into, out = of(experts, width, units), of(experts, units, width)
    return splits, of(width), of(kv_heads * queries * dim, width), of(width), of(experts, width), into, into, out


def _lowered(shape):
    run = jax.jit(partial(pallas_gpu.expert_block, per_token=shape[-1], **OPTIONS))
    return run.trace(*_described(shape)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("plan", TRIED)
def test_programs_have_every_tile_once(plan):
    """Of gate, up and down of each chosen expert, of the output projection, and of the splits; and what a launch has
    room for.
    """
    blocks = [gate_block(mine, u, plan) for mine in range(plan.each) for u in range(plan.gate_blocks)]
    found = {(int(columns.start) // COLUMNS, int(share)) for columns, share in blocks}
    assert found == set(itertools.product(range(plan.units // COLUMNS), range(plan.shares)))
    assert len(found) == len(blocks)
    assert plan.each * plan.per_token == plan.experts == PROGRAMS
    assert plan.shares * plan.share_tiles * ROWS == plan.width
    assert plan.down_blocks * plan.each * COLUMNS == plan.width
    assert plan.down_tiles * ROWS == plan.units
    assert plan.parts * plan.width == PROGRAMS * COLUMNS
    assert plan.parts * plan.project_tiles * ROWS == plan.columns * PROGRAMS == plan.inputs
    assert PROGRAMS // (plan.kv_heads * plan.queries) * plan.columns == plan.dim
    assert plan.columns % 32 == 0  # whole lines of memory, as stores of jax 0.12 want
    assert plan.project_tiles <= SLOTS
    assert GATED + plan.per_token <= COUNTERS


@pytest.mark.usefixtures("_for_hopper")
def test_the_kernel_is_lowered_for_hopper():
    text = _lowered(SHAPES[1])
    assert text.count("mosaic_gpu") > 0
    if hopper.IN_PLACE:
        assert "output_operand_alias" in text  # the counters


@pytest.mark.usefixtures("_for_hopper")
def test_the_kernel_has_the_derivatives_of_the_reference():
    splits, hidden, *weights = _described(SHAPES[1])

    def loss(op, hidden, *others):
        out = op(others[0], hidden, *others[1:], per_token=8, **OPTIONS)
        return jnp.sum(out.astype(jnp.float32))

    for op in (pallas_gpu.expert_block, reference.expert_block):
        slope = jax.eval_shape(jax.grad(partial(loss, op)), hidden, splits, *weights)
        assert (slope.shape, slope.dtype) == (hidden.shape, jnp.bfloat16)


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    "shape",
    [
        (4, 64, 8, 128, 2048, 128, 768, 8),
        (4, 256, 8, 128, 2048, 128, 768, 8),
        (8, 128, 8, 32, 2048, 128, 768, 8),
        (4, 128, 8, 128, 2048, 256, 768, 8),
        (4, 128, 8, 128, 2048, 128, 896, 8),
        (4, 128, 8, 128, 2048, 96, 768, 8),
        (4, 128, 8, 128, 2048, 128, 768, 6),
        (8, 128, 8, 128, 4096, 128, 1536, 8),
    ],
)
def test_shapes_whose_launch_has_not_been_run_are_refused(shape):
    with pytest.raises(NotImplementedError, match=r"has been run with Plan\(kv_heads=4, splits=128.* alone, got Plan"):
        _lowered(shape)


@pytest.mark.usefixtures("_for_hopper")
def test_other_types_are_refused():
    splits, *weights, down = _described(SHAPES[1])
    wide = jax.ShapeDtypeStruct(down.shape, jnp.float32)
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float32"):
        jax.eval_shape(partial(pallas_gpu.expert_block, per_token=8, **OPTIONS), splits, *weights, wide)


def test_programs_that_could_not_run_at_once_are_refused():
    with (
        mock.patch("clusterkv_jax.kernels.dispatch.device_kind", return_value="NVIDIA H100 PCIe"),
        mock.patch("clusterkv_jax.kernels.expert_block.plan.device_kind", return_value="NVIDIA H100 PCIe"),
        mock.patch("clusterkv_jax.kernels.expert_block.plan.multiprocessors", return_value=114),
        pytest.raises(NotImplementedError, match="needs a Hopper GPU of 128 multiprocessors, got NVIDIA H100 PCIe of"),
    ):
        _lowered(SHAPES[1])
