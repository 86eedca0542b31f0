"""A token through a layer of experts: checks, backends, broken variants, lowering, derivatives."""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.expert_layer import Weights, pallas_gpu, reference
from clusterkv_jax.kernels.expert_layer.copies import Here
from clusterkv_jax.kernels.expert_layer.experts import gate_block
from clusterkv_jax.kernels.expert_layer.plan import (
    ATTENDED,
    BLOCK,
    COLUMNS,
    GATED,
    LEAST,
    MOST,
    PROGRAMS,
    ROUTED,
    ROWS,
    SLOTS,
    TRIED,
)
from clusterkv_jax.kernels.pending import COUNTERS, Pending, whole
from tests.kernels.base import compiled, near, normal
from tests.support import hopper_lowering as hopper

# The kernel is one of a Hopper GPU alone: programs that wait for each other are nothing for an interpreter.
BACKENDS = {"xla": reference.expert_layer}
TOLERANCE = 2e-2  # of bfloat16 numbers, six products one after the other
ROWS_TOLERANCE = 1e-2  # of a bfloat16 row that a norm and a rotation made

# KV heads, query heads of each, head dim, width, experts, units, experts of a token. The second one is what the kernel
# takes, Qwen3-30B-A3B's.
SHAPES = [(2, 4, 16, 64, 24, 32, 3), (4, 8, 128, 2048, 128, 768, 8)]
OPTIONS = {"normalize": True, "eps": 1e-6, "offset": 0.0}
# Groups of heads, and their slots, of which some are no whole blocks.
GROUPS = {
    2: [(((0, 1),), (300,)), (((1,), (0,)), (131, 200))],
    4: [(((0, 1, 2, 3),), (700,)), (((2,), (3, 0, 1)), (131, 517))],
}
LENGTHS = [(0, 200, 64, 300), (700, 131, 1, 63), (65, 128, 127, 500)]
POSITION = 4321


def _shape():
    return SHAPES[0 if jax.default_backend() == "cpu" else 1]


def operands(seed, groups, lengths, real=True):
    """What no row has is NaN, behind the rows and among them. Every seventh expert has the same weights: to draw
    them all would take long.
    """
    kv_heads, queries, dim, width, experts, units, per_token = _shape()
    bf16 = lambda i, *shape: jnp.asarray(normal(seed + i, *shape) * shape[-1] ** -0.5, jnp.bfloat16)  # noqa: E731
    scale = lambda i, size: 1 + 0.3 * bf16(i, size) * size**0.5  # noqa: E731
    few = min(experts, 7)
    shapes = (units, width), (units, width), (width, units)
    inputs = [bf16(10 + i, few, *shape).swapaxes(1, 2) for i, shape in enumerate(shapes)]
    many = (jnp.tile(x, (-(-experts // few), 1, 1))[:experts] for x in inputs)
    of_heads = (bf16(20 + i, heads * dim, width) for i, heads in enumerate((kv_heads * queries, kv_heads, kv_heads)))
    norms, projection = (scale(30, dim), scale(31, dim)), bf16(32, width, kv_heads * queries * dim).T
    router = 4 * bf16(35, experts, width)
    weights = Weights(scale(33, width), *of_heads, *norms, projection, scale(34, width), router, *many)
    outputs = jnp.asarray(0.1 * normal(seed + 1, per_token, width), jnp.float32)
    hidden = Pending(bf16(2, width) * width**0.5, outputs, jnp.zeros(COUNTERS, jnp.int32))
    angles = POSITION * 10.0 ** -np.arange(dim // 2)
    angles = tuple(jnp.asarray(x, jnp.float32) for x in (np.cos(angles), np.sin(angles)))
    rows = [_rows(seed + 40 + sum(mine), mine, count, lengths, dim) for mine, count in zip(*groups, strict=True)]
    token = jnp.full((1, 1), POSITION, jnp.int32), jnp.full((1, 1), real)
    return hidden, token, angles, weights, tuple(x for x, _ in rows), tuple(x for _, x in rows)


def _rows(seed, mine, slots, lengths, dim):
    length = np.asarray([[min(lengths[head], slots) for head in mine]], np.int32)
    degree = np.exp(3 * np.random.default_rng(seed).uniform(size=(1, len(mine), slots)))
    hole = np.random.default_rng(seed + 1).uniform(size=degree.shape) < 0.1
    there = (np.arange(slots) < length[..., None]) & ~hole
    rows = (np.where(there[..., None], normal(seed + i, *degree.shape, dim), np.nan) for i in (2, 3))
    keys, values = (jnp.asarray(x, jnp.bfloat16) for x in rows)
    positions = jnp.asarray(np.where(there, 7, -1), jnp.int32)
    return (keys, values, jnp.asarray(np.where(there, degree, 0), jnp.float32), positions), jnp.asarray(length)


def _rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def exact(hidden, token, angles, weights, buffers, lengths, *, heads, per_token, normalize, eps, offset):
    """In float64, rounded where numbers are stored: the state before the experts, what they add, the token's rows."""
    w = jax.tree.map(lambda x: x if x.ndim == 3 else np.asarray(x, np.float64), weights)
    norm = lambda x, scale: x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * (offset + scale)  # noqa: E731
    outputs = _rounded(np.asarray(hidden.outputs, np.float64).sum(axis=0))
    state = _rounded(np.asarray(hidden.total, np.float64) + outputs)
    x, dim = _rounded(norm(state, w.scale)), len(w.q_scale)
    q, k, v = (_rounded(y @ x).reshape(-1, dim) for y in (w.q, w.k, w.v))
    cos, sin = (np.asarray(y, np.float64) for y in angles)

    def turned(x, scale):
        a, b = np.split(norm(x, scale), 2, axis=1)
        return _rounded(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1))

    q, k = turned(q, w.q_scale).reshape(len(k), -1, dim), turned(k, w.k_scale)
    attended = np.zeros_like(q)
    for group, length, mine in zip(buffers, lengths, heads, strict=True):
        for place, head in enumerate(mine):
            keys, values, degree = (np.asarray(x[0, place], np.float64) for x in group[:3])
            there = (np.arange(len(degree)) < int(length[0, place])) & (degree > 0)
            keys, values, degree = keys[there], values[there], degree[there]
            if bool(token[1][0, 0]) and int(length[0, place]) < len(group[2][0, place]):
                keys, values = np.vstack([keys, k[head]]), np.vstack([values, v[head]])
                degree = np.append(degree, 1)
            if len(degree):
                scores = q[head] @ keys.T / np.sqrt(dim) + np.log(degree)
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                attended[head] = shares / shares.sum(axis=1, keepdims=True) @ values
    state = _rounded(state + _rounded(_rounded(attended.reshape(-1)) @ w.projection))
    x = _rounded(norm(state, w.behind))
    logits = w.router @ x
    best = np.argsort(-logits, kind="stable")[:per_token]
    shares = np.exp(logits - logits.max())
    shares = shares[best] / (shares[best] if normalize else shares).sum()
    # Of the chosen experts alone: to have all weights in float64 would take long.
    of_best = (np.asarray(y[best], np.float64) for y in (w.gate, w.up, w.down))
    added = np.zeros_like(state)
    for share, gate, up, down in zip(shares, *of_best, strict=True):
        inner = x @ gate
        added += share * (_rounded(inner / (1 + np.exp(-inner)) * (x @ up)) @ down)
    return state, added, k, v


def check(implementation, args, heads, **options):
    """The hidden state; the token's row in the slot behind the others, if there is one; and nothing else changed."""
    options = {"per_token": _shape()[-1], **OPTIONS, **options}
    state, added, k, v = exact(*args, heads=heads, **options)
    hidden, buffers, lengths = compiled(partial(implementation, heads=heads, **options))(*args)
    near(hidden.total, state, TOLERANCE, axes=0)
    near(jnp.sum(hidden.outputs, axis=0), added, TOLERANCE, axes=0)
    assert hidden.total.dtype == jnp.bfloat16
    assert not np.any(hidden.counters)
    real = int(args[1][1][0, 0])
    for before, after, held, length, mine in zip(args[4], buffers, args[5], lengths, heads, strict=True):
        np.testing.assert_array_equal(length, np.asarray(held) + real)
        slots, slot = before[2].shape[2], np.asarray(held)[0]
        entered = [place for place in range(len(mine)) if real and slot[place] < slots]
        expected = [np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in before]
        result = [np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for x in after]
        for place in entered:
            for rows, row in zip(result[:2], (k[mine[place]], v[mine[place]]), strict=True):
                near(rows[0, place, slot[place]], row, ROWS_TOLERANCE, axes=0)
            for x, new in zip(expected, (*(x[0, place, slot[place]] for x in result[:2]), 1, POSITION), strict=True):
                x[0, place, slot[place]] = new
        for x, y in zip(result, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def check_layer(implementation, *, examples=3):
    groups = GROUPS[_shape()[0]]
    for seed in range(examples):
        heads, slots = groups[seed % 2]
        check(implementation, operands(10 * seed, (heads, slots), LENGTHS[seed % 3]), heads)


def check_no_token(implementation, *, examples=1):
    """A token that is none is written nowhere, but attends."""
    heads, slots = GROUPS[_shape()[0]][0]
    check(implementation, operands(examples, (heads, slots), (100, 0, 64, 130), real=False), heads)


def check_options(implementation, *, examples=1):
    """Shares of all experts, of which the chosen ones have but a part, and scales that lie around 0."""
    heads, slots = GROUPS[_shape()[0]][0]
    options = {"normalize": False, "eps": 0.5, "offset": 1.0}
    hidden, token, angles, weights, *cache = operands(examples, (heads, slots), (3, 70, 3, 3))
    weights = weights._replace(router=weights.router / 8)
    check(implementation, (hidden, token, angles, weights, *cache), heads, **options)


def check_equal_experts(implementation, *, examples=1):
    """Of equal logits the first experts are chosen."""
    heads, slots = GROUPS[_shape()[0]][0]
    hidden, token, angles, weights, *cache = operands(examples, (heads, slots), (3, 70, 3, 3))
    router = jnp.where(jnp.arange(len(weights.router))[:, None] % 5 == 1, weights.router[:1], 0)
    check(implementation, (hidden, token, angles, weights._replace(router=router), *cache), heads)


def without_pending_outputs(hidden, *args, **options):
    return reference.expert_layer(replace(hidden, outputs=0 * hidden.outputs), *args, **options)


def without_the_token(hidden, token, *args, **options):
    """It enters, and does not attend to itself."""
    out, *_ = reference.expert_layer(hidden, (token[0], token[1] & False), *args, **options)
    return out, *reference.expert_layer(hidden, token, *args, **options)[1:]


def without_degrees(hidden, token, angles, weights, buffers, lengths, **options):
    plain = tuple((keys, values, jnp.minimum(degree, 1), at) for keys, values, degree, at in buffers)
    out, *_ = reference.expert_layer(hidden, token, angles, weights, plain, lengths, **options)
    return out, *reference.expert_layer(hidden, token, angles, weights, buffers, lengths, **options)[1:]


def without_turning(hidden, token, angles, *args, **options):
    still = jnp.ones_like(angles[0]), jnp.zeros_like(angles[1])
    return reference.expert_layer(hidden, token, still, *args, **options)


def without_lengths(hidden, token, angles, weights, buffers, lengths, **options):
    out, after, _ = reference.expert_layer(hidden, token, angles, weights, buffers, lengths, **options)
    return out, after, lengths


def entering_anyway(hidden, token, *args, **options):
    return reference.expert_layer(hidden, (token[0], token[1] | True), *args, **options)


def without_offset(*args, offset, **options):
    return reference.expert_layer(*args, offset=0 * offset, **options)


def the_last_of_equal_experts(hidden, token, angles, weights, *args, **options):
    names = ("router", "gate", "up", "down")
    turned = weights._replace(**{name: getattr(weights, name)[::-1] for name in names})
    return reference.expert_layer(hidden, token, angles, turned, *args, **options)


def with_all_shares(*args, normalize, **options):
    return reference.expert_layer(*args, normalize=not normalize, **options)


def with_counters_left(hidden, *args, **options):
    out, *rest = reference.expert_layer(hidden, *args, **options)
    return replace(out, counters=out.counters + 1), *rest


def with_keys_for_values(hidden, token, angles, weights, *args, **options):
    """In the cache."""
    out, *_ = reference.expert_layer(hidden, token, angles, weights, *args, **options)
    return out, *reference.expert_layer(hidden, token, angles, weights._replace(v=weights.k), *args, **options)[1:]


CHECKS = [check_layer, check_no_token, check_options, check_equal_experts]
BROKEN = {
    check_layer: [
        without_pending_outputs,
        without_the_token,
        without_degrees,
        without_turning,
        without_lengths,
        with_counters_left,
        with_keys_for_values,
    ],
    check_no_token: [entering_anyway],
    check_options: [without_offset, with_all_shares],
    check_equal_experts: [the_last_of_equal_experts],
}


@pytest.fixture
def _for_hopper():
    with (
        mock.patch("clusterkv_jax.kernels.dispatch.device_kind", return_value="NVIDIA H200"),
        mock.patch("clusterkv_jax.kernels.expert_layer.plan.multiprocessors", return_value=132),
        hopper.lowered(),
    ):
        yield


def _described(shape, groups=(((0, 1, 2, 3),), (3404,))):
    kv_heads, queries, dim, width, experts, units, per_token = shape
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    numbers, counts = partial(of, dtype=jnp.float32), partial(of, dtype=jnp.int32)
    inputs, rows = kv_heads * queries * dim, kv_heads * dim
    hidden = Pending(of(width), numbers(per_token, width), counts(COUNTERS))
    token = counts(1, 1), jax.ShapeDtypeStruct((1, 1), bool)
    of_heads = of(inputs, width), of(rows, width), of(rows, width), of(dim), of(dim), of(inputs, width)
    into, out = of(experts, width, units), of(experts, units, width)
    weights = Weights(of(width), *of_heads, of(width), of(experts, width), into, into, out)
    buffers = tuple(
        (of(1, len(mine), slots, dim), of(1, len(mine), slots, dim), numbers(1, len(mine), slots), None)
        for mine, slots in zip(*groups, strict=True)
    )
    lengths = tuple(counts(1, len(mine)) for mine in groups[0])
    return hidden, token, (numbers(dim // 2), numbers(dim // 2)), weights, buffers, lengths


def _lowered(shape, heads=((0, 1, 2, 3),), slots=(3404,)):
    run = jax.jit(partial(pallas_gpu.expert_layer, heads=heads, per_token=shape[-1], **OPTIONS))
    return run.trace(*_described(shape, (heads, slots))).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("plan", TRIED)
def test_programs_have_every_tile_once(plan):
    """Of each chosen expert, of the heads' weights, and of the output projection; and what a launch has room for."""
    blocks = [gate_block(mine, u, plan) for mine in range(plan.each) for u in range(plan.gate_blocks)]
    found = {(int(columns.start) // COLUMNS, int(share)) for columns, share in blocks}
    assert found == set(itertools.product(range(plan.units // COLUMNS), range(plan.shares)))
    assert len(found) == len(blocks)
    programs = [Here(plan, np.int32(number), *[None] * 8) for number in range(PROGRAMS)]
    found = [
        (int(part), int(first) + t) for part, first in (x.heads for x in programs) for t in range(plan.head_blocks)
    ]
    width = plan.kv_heads * (plan.queries + 2) * plan.dim
    assert sorted(found) == sorted(itertools.product(range(plan.head_parts), range(width // COLUMNS)))
    tiles = [x.projection(t) for x in programs for t in range(plan.project_tiles)]
    heads = range(0, plan.kv_heads * plan.queries, ROWS // COLUMNS)
    starts = heads, range(0, plan.dim, COLUMNS), range(0, plan.width, COLUMNS)
    assert sorted(tuple(int(x.start) for x in tile) for tile in tiles) == sorted(itertools.product(*starts))
    for program, i, which in itertools.product(programs, range(plan.part_tiles), range(plan.project_blocks)):
        queries, rows, columns = program.projection(i * plan.project_blocks + which)
        kv_head, block = program.part
        assert (rows.start, columns.start) == (block * COLUMNS, program.outputs(which).start)
        assert (
            queries.start == kv_head * plan.queries + i * ROWS // COLUMNS
        )  # of the inputs that `put_columns` has there
    assert plan.each * plan.per_token == plan.experts == PROGRAMS
    assert plan.shares * plan.share_tiles * ROWS == plan.width
    assert plan.down_blocks * plan.each * COLUMNS == plan.width
    assert plan.down_tiles * ROWS == plan.units
    assert plan.part_tiles * ROWS == plan.queries * COLUMNS
    assert plan.queries == 2 * plan.kv_heads == 8  # columns of a block, with queries, or with keys and values
    assert plan.dim == 2 * COLUMNS  # the halves that turn
    assert 2 * BLOCK <= ROWS < plan.width  # weights of two blocks, behind the queries
    assert plan.project_tiles <= SLOTS <= plan.head_blocks
    assert ROUTED < ATTENDED
    assert ATTENDED + plan.kv_heads <= GATED
    assert GATED + plan.per_token <= COUNTERS


@pytest.mark.parametrize("plan", TRIED)
@pytest.mark.parametrize("slots", [LEAST, LEAST + 1, 2048, 17021, MOST])
def test_spans_have_every_block_once(plan, slots):
    assert plan.span(slots) <= slots
    for rows in {0, 1, BLOCK, BLOCK + 1, slots // 2, slots - 1, slots}:
        blocks = -(-rows // BLOCK)
        begins = [int(plan.begin(np.int32(split), np.int32(blocks))) for split in range(plan.splits + 2)]
        assert (begins[0], begins[-2], begins[-1]) == (0, blocks, blocks)  # and nothing behind the last split
        counts = np.diff(begins)
        assert counts.min() >= 0
        assert counts.max() * BLOCK <= plan.span(slots)


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(("heads", "slots"), [(((0, 1, 2, 3),), (3404,)), (((1,), (0, 2, 3)), (301, 5007))])
def test_the_kernel_is_lowered_for_hopper(heads, slots):
    text = _lowered(SHAPES[1], heads, slots)
    assert text.count("mosaic_gpu") > 0
    if hopper.IN_PLACE:  # from jax 0.11 on
        changed = 1 + sum(4 for _ in heads)  # counters; keys, values, degrees and lengths
        assert text.count("output_tuple_indices") >= changed


@pytest.mark.usefixtures("_for_hopper")
def test_the_kernel_has_the_derivatives_of_the_reference():
    """Where the launch is the reference, and shapes are small."""
    heads, slots = GROUPS[SHAPES[0][0]][0]
    hidden, *others = operands(0, (heads, slots), LENGTHS[0])
    others[3] = jax.tree.map(lambda x: jnp.nan_to_num(x) if x.dtype == jnp.bfloat16 else x, others[3])
    options = {"heads": heads, "per_token": SHAPES[0][-1], "normalize": False, "eps": 0.5, "offset": 1.0}

    def launch(plan, hidden, token, *others, **settings):
        token = token[0], token[1] > 0
        return reference.expert_layer(hidden, token, *others, per_token=plan.per_token, **settings)

    def loss(op, total):
        out, *_ = op(replace(hidden, total=total), *others, **options)
        return jnp.sum(whole(out).astype(jnp.float32) ** 2)

    with (
        mock.patch("clusterkv_jax.kernels.expert_layer.pallas_gpu.refusal", return_value=None),
        mock.patch("clusterkv_jax.kernels.expert_layer.mosaic.run", launch),
    ):
        slopes = [jax.grad(partial(loss, op))(hidden.total) for op in (pallas_gpu.expert_layer, reference.expert_layer)]
    assert np.any(slopes[1])
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in slopes))


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    "shape",
    [
        (8, 8, 32, 2048, 128, 768, 8),
        (4, 8, 128, 2048, 256, 768, 8),
        (4, 8, 128, 2048, 128, 896, 8),
        (4, 8, 128, 2048, 96, 768, 8),
        (4, 8, 128, 2048, 128, 768, 6),
        (4, 16, 128, 4096, 128, 1536, 8),
    ],
)
def test_shapes_whose_launch_has_not_been_run_are_refused(shape):
    heads = (tuple(range(shape[0])),)
    with pytest.raises(NotImplementedError, match=r"has been run with Plan\(kv_heads=4, queries=8.* alone, got Plan"):
        _lowered(shape, heads)


@pytest.mark.usefixtures("_for_hopper")
def test_other_numbers_of_slots_and_other_types_are_refused():
    for slots in (127, 131073):
        with pytest.raises(NotImplementedError, match=f"takes 128 to 131072 slots, got {slots}"):
            _lowered(SHAPES[1], slots=(slots,))
    hidden, token, angles, weights, *cache = _described(SHAPES[1])
    run = partial(pallas_gpu.expert_layer, heads=((0, 1, 2, 3),), per_token=8, **OPTIONS)
    wide = jax.ShapeDtypeStruct(weights.down.shape, jnp.float32)
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float32"):
        jax.eval_shape(run, hidden, token, angles, weights._replace(down=wide), *cache)


def test_programs_that_could_not_run_at_once_are_refused():
    with (
        mock.patch("clusterkv_jax.kernels.dispatch.device_kind", return_value="NVIDIA H100 PCIe"),
        mock.patch("clusterkv_jax.kernels.expert_layer.plan.device_kind", return_value="NVIDIA H100 PCIe"),
        mock.patch("clusterkv_jax.kernels.expert_layer.plan.multiprocessors", return_value=114),
        pytest.raises(NotImplementedError, match="needs a Hopper GPU of 132 multiprocessors, got NVIDIA H100 PCIe of"),
    ):
        _lowered(SHAPES[1])
