"""A program's part of attention: the span of a KV head's slots that it reads, or the token that enters the head."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import div
from jaxtyping import Array, Float

from clusterkv_jax.kernels.expert_layer.plan import BLOCK, COLUMNS, Plan
from clusterkv_jax.kernels.expert_layer.tiles import ACC, column, put_rows, slot_of
from clusterkv_jax.kernels.hopper import ALONG_COLUMNS, ALONG_ROWS, FULL, load

LOG2_E = math.log2(math.e)
Block = Float[Array, "rows 8"]


@dataclass(frozen=True)
class Held:
    """What a KV head holds, and the span of its slots that a program reads.

    Attributes:
        groups: for each group of heads its arrays, whether the head is one of it, None for certain, and its place.
        kv_head: its number.
        slot: where the token enters, if there is room.
        enters: 1 for a token, 0 for what is none.
        stored: whether it has a slot.
        rows: slots that are filled before it.
        first, count: of the span's blocks.
    """

    groups: tuple[tuple[Any, Any, Any], ...]
    kv_head: Any
    slot: Any
    enters: Any
    stored: Any
    rows: Any
    first: Any
    count: Any

    def of_group(self, function: Callable[..., None]) -> None:
        """`function` of the place and the arrays of the group that has the head."""
        for arrays, here, place in self.groups:
            if here is None:
                function(place, *arrays)
            else:
                pl.when(here)(partial(function, place, *arrays))


def held_by(
    kv_head: Any, split: Any, buffers: Any, heads: Sequence[tuple[int, ...]], enters: Any, plan: Plan
) -> Callable[[], Held]:
    """Begin to load what a head holds, for what says it; behind the last split there is an empty one."""
    groups, lengths, enters = [], [], enters[0, 0]
    for arrays, mine in zip(buffers, heads, strict=True):
        here, place = jnp.bool_(False), jnp.int32(0)
        for i, number in enumerate(mine):
            here, place = here | (kv_head == number), jnp.where(kv_head == number, i, place)
        if mine == tuple(range(plan.kv_heads)):
            here, place = None, kv_head
        groups.append((arrays, here, place))
        lengths.append(arrays[4][0, place])

    def finish() -> Held:
        slot, rows, room = jnp.int32(0), jnp.int32(0), jnp.bool_(False)
        for (arrays, here, _), length in zip(groups, lengths, strict=True):
            slots = arrays[2].shape[2]
            own = length, jnp.minimum(length, slots), length < slots
            if here is None:
                slot, rows, room = own
            else:
                slot, rows, room = (jnp.where(here, *pair) for pair in zip(own, (slot, rows, room), strict=True))
        blocks = div(rows + (BLOCK - 1), BLOCK)
        first = plan.begin(split, blocks)
        count = plan.begin(split + 1, blocks) - first
        return Held(tuple(groups), kv_head, slot, enters, (enters > 0) & room, rows, first, count)

    return finish


# --- biases of slots ---


def weigh(held: Held, plan: Plan, bias: Any) -> Callable[[], tuple[Any, Any]]:
    """Begin to load the degrees of the span's slots, for what puts their logarithms into `bias` and goes on from there.

    That returns the first slot that `bias` has, and whether any of the rows that are held is none: its degree is 0.
    """

    def begin(place: Any, keys: Any, values: Any, degree: Any, *_: Any) -> Callable[[], tuple[Any, Any]]:
        del keys, values
        size = plan.span(degree.shape[2])
        layout = plgpu.Layout.WG_STRIDED((size,), 1)
        start = jnp.minimum(held.first * BLOCK, degree.shape[2] - size)
        count = load(degree.at[0, place, pl.ds(start, size)], layout, optimized=False)

        def finish() -> tuple[Any, Any]:
            slot = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + start
            there = (slot < held.rows) & (count > 0)
            logarithm = jnp.log(jnp.where(there, count, 1.0)) * LOG2_E
            bias[pl.ds(0, size)] = jnp.where(there, logarithm, -jnp.inf)
            # A block may go on behind the last slot.
            bias[pl.ds(size, BLOCK)] = plgpu.layout_cast(jnp.full((BLOCK,), -jnp.inf, jnp.float32), ALONG_ROWS)
            missing = (slot >= held.first * BLOCK) & (slot < held.rows) & ~there
            return start, jnp.max(jnp.where(missing, 1.0, 0.0)) > 0

        return finish

    if held.groups[0][1] is None:
        arrays, _, place = held.groups[0]
        return begin(place, *arrays)
    none = lambda: (jnp.int32(0), jnp.bool_(False))  # noqa: E731
    each = [jax.lax.cond(here, lambda x=x, at=at: begin(at, *x)(), none) for x, here, at in held.groups]
    starts, holes = zip(*each, strict=True)
    return lambda: (sum(starts[1:], starts[0]), reduce(or_, holes))


# --- heads of the token ---


def load_heads(projected: Any, first: Any) -> Callable[[], tuple[Block, Block]]:
    """Begin to load eight heads of the token, for what gives their halves as the rows of two blocks."""

    def parts_of(rows: Any) -> list[Block]:
        places = [projected.at[part, rows, pl.ds(first, 8)] for part in range(projected.shape[0])]
        return [load(place, FULL, optimized=False) for place in places]

    each = [parts_of(pl.ds(i, COLUMNS)) for i in (0, COLUMNS)]

    def whole(parts: list[Block]) -> Block:
        total: Any = sum(parts[1:], parts[0])
        return total.astype(jnp.bfloat16).astype(jnp.float32)

    return lambda: (whole(each[0]), whole(each[1]))


def load_halves(x: Any) -> list[Any]:
    """Begin to load what heads have in common, by halves."""
    return [load(x.at[pl.ds(i, COLUMNS)], ALONG_ROWS, optimized=False) for i in range(0, x.shape[0], COLUMNS)]


def turned(a: Block, b: Block, scales: list[Any], angles: list[Any], eps: float, offset: float) -> tuple[Block, Block]:
    """Heads normalised, and turned by the cosine and the sine of their position."""
    factor = jax.lax.rsqrt(jnp.sum(a * a + b * b, axis=0) / (2 * COLUMNS) + eps)
    a, b = (
        x * _beside(factor, COLUMNS) * _along(offset + scale.astype(jnp.float32))
        for x, scale in zip((a, b), scales, strict=True)
    )
    cos, sin = map(_along, angles)
    a, b = a * cos - b * sin, b * cos + a * sin
    return a.astype(jnp.bfloat16).astype(jnp.float32), b.astype(jnp.bfloat16).astype(jnp.float32)


def _along(x: Float[Array, " rows"]) -> Block:
    return jax.lax.broadcast_in_dim(x, (x.shape[0], 8), (0,))


def _beside(x: Float[Array, " 8"], rows: int) -> Block:
    return jax.lax.broadcast_in_dim(x, (rows, 8), (1,))


# --- attention ---


def attend_token(queries: Any, keys: Any, values: Any, held: Held, plan: Plan, row: Any, out: Any) -> None:
    """The split that is the token alone; leaves its key and its value in `row`.

    Heads come by halves, as columns: queries of the KV head, keys of all heads, and values behind all keys.
    """
    keys = [column(x, held.kv_head) for x in keys]
    values = [column(x, plan.kv_heads + held.kv_head) for x in values]
    score: Any = sum(jnp.sum(q * _along(k), axis=0) for q, k in zip(queries, keys, strict=True))
    score = score * (LOG2_E / math.sqrt(plan.dim))
    out["lses"][held.kv_head, plan.splits] = _beside(jnp.where(held.stored, score, -jnp.inf), COLUMNS)
    for j, x in enumerate(values):
        out["parts"][held.kv_head, plan.splits, pl.ds(j * COLUMNS, COLUMNS)] = _along(x)
    for which, halves in enumerate((keys, values)):
        for j, x in enumerate(halves):
            row[which, pl.ds(j * COLUMNS, COLUMNS)] = x.astype(row.dtype)


def append(held: Held, position: Any, row: Any) -> None:
    """Store the key and the value that are in `row`."""
    plgpu.commit_smem()

    def write(place: Any, keys: Any, values: Any, degree: Any, positions: Any, _: Any) -> None:
        for which, x in enumerate((keys, values)):
            plgpu.copy_smem_to_gmem(row.at[which], x.at[0, place, held.slot])
        plgpu.wait_smem_to_gmem(0)
        degree[0, place, held.slot] = jnp.float32(1.0)
        if positions is not None:
            positions[0, place, held.slot] = position

    held.of_group(write)


@dataclass(frozen=True)
class Span:
    """What attention to a span of slots reads.

    Attributes:
        ring: blocks of keys and values, the first behind so many other tiles: `before`.
        inputs: of products: the queries, and behind them room for weights.
        arrived: barriers of the ring's tiles.
        bias: of slots, from slot `start` on.
        holes: whether any of the rows that are held is none.
    """

    plan: Plan
    held: Held
    ring: Any
    inputs: Any
    arrived: Any
    bias: Any
    start: Any
    holes: Any
    before: int

    def slot(self, i: Any) -> Any:
        """Of the ring, that has block i."""
        return slot_of(self.before + i)


def _bias_of(span: Span, i: Any) -> Float[Array, " block"]:
    """Of block i, and none of those behind the last."""
    held = span.held
    first = jnp.minimum(held.first + i, held.first + held.count - 1) * BLOCK - span.start
    own = load(span.bias.at[pl.ds(first, BLOCK)], ALONG_ROWS, optimized=False)
    return jnp.where(i < held.count, own, -jnp.inf)


def _wait_for(span: Span, i: Any) -> None:
    """Until block i is there, without the values of what is no row: they may be NaN."""
    slot = span.slot(i)
    plgpu.barrier_wait(span.arrived.at[slot])

    @pl.when(span.holes | ((span.held.first + i + 1) * BLOCK > span.held.rows))
    def _():
        there = jax.lax.broadcast_in_dim(_bias_of(span, i), (BLOCK, COLUMNS), (0,)) > -jnp.inf

        @pl.loop(0, span.plan.dim // COLUMNS)
        def _(j):
            tile = span.ring.at[slot, 1, j]
            tile[...] = jnp.where(there, load(tile, FULL, optimized=False), jnp.bfloat16(0))

        plgpu.commit_smem()


def _scores(span: Span, blocks: list[Any]) -> list[Block]:
    """Of two blocks' slots, in units of ln 2; -inf where there is no row."""
    dim = span.plan.dim

    def multiply(*accumulators: Any) -> list[Block]:
        for i, scores in zip(blocks, accumulators, strict=True):
            for j in range(dim // COLUMNS):
                x = span.inputs.at[0, :, pl.ds(j * COLUMNS, COLUMNS)].transpose((1, 0))
                plgpu.wgmma(scores, span.ring.at[span.slot(i), 0, j], x)
        plgpu.wgmma_wait(0)
        return [scores[...] for scores in accumulators]

    scores = pl.run_scoped(multiply, *[ACC((BLOCK, 8), jnp.float32)] * 2)
    biases = [_along(_bias_of(span, i)) for i in blocks]
    return [
        jnp.where(b > -jnp.inf, s * (LOG2_E / math.sqrt(dim)) + b, -jnp.inf)
        for s, b in zip(scores, biases, strict=True)
    ]


def _mixed(span: Span, blocks: list[Any], weights: list[Block], before: list[Block]) -> list[Block]:
    """Values by their weights, added to what is there, for each block of their columns."""
    for j, weight in enumerate(weights):
        put_rows(weight, span.inputs.at[1, :, pl.ds(j * BLOCK, BLOCK)])
    plgpu.commit_smem()

    def mix(totals: Any) -> None:
        for j, i in enumerate(blocks):
            x = span.inputs.at[1, :, pl.ds(j * BLOCK, BLOCK)].transpose((1, 0))
            for k, total in enumerate(totals):
                plgpu.wgmma(total, span.ring.at[span.slot(i), 1, k].transpose((1, 0)), x)
        plgpu.wgmma_wait(0)

    after: Any = pl.run_state(mix)([ACC.init(x) for x in before])
    plgpu.commit_smem()  # all have read the blocks
    return after


def attend(span: Span, feed: Callable[[Any], None]) -> tuple[list[Block], Block]:
    """Attention to the span's blocks, two at a time, and the base 2 logarithms of its sums, the same in all rows.

    `feed` begins to copy what comes into the place of a block.
    """
    count = span.held.count

    def read(pair: Any, state: Any) -> Any:
        peak, total, mixed = state
        # The second may be none: it has no weight then, and what is in its place is finite, a weight or an old block.
        blocks = [2 * pair, 2 * pair + 1]
        pl.loop(blocks[0], jnp.minimum(blocks[0] + 2, count))(partial(_wait_for, span))
        scores = _scores(span, blocks)
        higher = jnp.maximum(peak, jnp.max(jnp.maximum(*scores), axis=0))
        base = jnp.where(higher > -jnp.inf, higher, 0.0)
        shrink = jnp.exp2(peak - base)
        weights = [jnp.exp2(s - _beside(base, BLOCK)) for s in scores]
        total = total * _beside(shrink, BLOCK) + weights[0] + weights[1]
        mixed = _mixed(span, blocks, weights, [x * _beside(shrink, COLUMNS) for x in mixed])
        pl.loop(blocks[0], blocks[0] + 2)(feed)
        return higher, total, mixed

    nothing = plgpu.layout_cast(jnp.full((8,), -jnp.inf, jnp.float32), ALONG_COLUMNS)
    zeros = lambda: plgpu.layout_cast(jnp.zeros((COLUMNS, 8), jnp.float32), FULL)  # noqa: E731
    start = nothing, zeros(), [zeros() for _ in range(span.plan.dim // COLUMNS)]
    peak, total, mixed = jax.lax.fori_loop(0, div(count + 1, 2), read, start)
    total = jnp.sum(total, axis=0)
    whole = _beside(jnp.where(total > 0, total, 1.0), COLUMNS)
    return [x / whole for x in mixed], _beside(peak + jnp.log(total) * LOG2_E, COLUMNS)


def combine(parts: Any, lses: Any, kv_head: Any, block: Any, plan: Plan) -> Callable[[], Block]:
    """Begin to load a block of D of all queries of a KV head, for what adds up the splits by their shares."""
    splits, rows = range(plan.splits + 1), pl.ds(block * COLUMNS, COLUMNS)
    logarithms = [load(lses.at[kv_head, i, 0], ALONG_COLUMNS, optimized=False) for i in splits]
    values = [load(parts.at[kv_head, i, rows], FULL, optimized=False) for i in splits]

    def finish() -> Block:
        peak = logarithms[0]
        for logarithm in logarithms[1:]:
            peak = jnp.maximum(peak, logarithm)
        peak = jnp.where(peak > -jnp.inf, peak, 0.0)
        weights = [jnp.exp2(logarithm - peak) for logarithm in logarithms]
        mixed: Any = [_beside(weight, COLUMNS) * value for weight, value in zip(weights, values, strict=True)]
        whole: Any = sum(weights[1:], weights[0])
        return sum(mixed[1:], mixed[0]) / _beside(jnp.where(whole > 0, whole, 1.0), COLUMNS)

    return finish
