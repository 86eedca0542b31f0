"""The launch of `expert_block` for Hopper.

    grid (programs,)   all of them at once, one on a multiprocessor

A program has its part of every step. It waits for the others by counters in memory where a step needs what all of them
made: the splits combined, the output projection, the router's logits, gate and up. Between launches the memory would
rest while one ends and the next one begins. Here copies run ahead of the products, through a ring of tiles in shared
memory: the output projection's while splits are combined, those of down while gate and up go on.

Programs that did not run at once would wait for ever. So there are no more than multiprocessors, and nothing that
decodes has two such launches side by side. Two processes must not decode on one GPU under MPS, which runs both at once.

Bytes: the weights of the projection and of the chosen experts, once. Bound: reads, and four times of waiting.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from clusterkv_jax.kernels.expert_block.plan import (
    COLUMNS,
    COMBINED,
    GATED,
    PROGRAMS,
    PROJECTED,
    ROUTED,
    ROWS,
    SLOTS,
)
from clusterkv_jax.kernels.expert_block.tiles import TILED, fetch, gate_block, products, put, slot_of
from clusterkv_jax.kernels.hopper import ALONG_COLUMNS, ALONG_ROWS, FULL, load, signal, spread, vector, wait


def run(plan, splits, hidden, projection, scale, router, gate, up, down, *, normalize, eps, offset):
    """See `clusterkv_jax.kernels.expert_block.expert_block`, of shapes that make this plan."""
    shapes = [
        ((plan.inputs,), jnp.float32),
        ((plan.parts, plan.width), jnp.float32),
        ((plan.width,), hidden.dtype),
        ((plan.experts,), jnp.float32),
        ((plan.per_token, plan.shares, 2, plan.units), jnp.float32),
        ((plan.per_token, plan.width), jnp.float32),
    ]
    launch = plgpu.kernel(
        partial(_program, plan=plan, normalize=normalize, eps=eps, offset=offset),
        out_type=[jax.ShapeDtypeStruct(*one) for one in shapes],
        grid=(PROGRAMS,),
        grid_names=("program",),
        kernel_name="expert_block",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def results(counters):
        operands = splits.parts, splits.lses, splits.filled, counters
        _, _, total, _, _, rows = launch(*operands, hidden, projection, scale, router, gate, up, down)
        return total, rows

    total, rows = _changing(splits.counters, results, shapes[2], shapes[5])
    return total + jnp.sum(rows, axis=0).astype(total.dtype)


def _changing(counters, launch, *results):
    """`launch` of counters that change where they lie: an array that is only read might be shared."""

    def body(state):
        counters, *outs = state
        for out, value in zip(outs, launch(counters), strict=True):
            out[...] = value

    return pl.run_state(body)((counters, *(jnp.zeros(*one) for one in results)))[1:]


def _program(*refs, plan, **settings):
    """Allocates: a ring of tiles, the token's inputs of a product, room for a vector, and a barrier for each tile."""
    dtype, most = refs[4].dtype, max(plan.inputs // plan.parts, plan.width, plan.units)
    pl.run_scoped(
        partial(_steps, refs[:11], refs[11:], plan=plan, **settings),
        plgpu.SMEM((SLOTS, ROWS, COLUMNS), dtype, transforms=TILED),
        plgpu.SMEM((most // ROWS, 8, ROWS), dtype, transforms=TILED),
        plgpu.SMEM((max(plan.experts, plan.splits),), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
    )


def _steps(refs, outs, ring, inputs, room, arrived, *, plan, normalize, eps, offset):
    """All steps of a program. What comes from other programs is read behind `wait`."""
    parts, lses, filled, counters, hidden, projection, scale, router, gate, up, down = refs
    attended, projected, total, logits, halves, rows = outs
    number = jax.lax.axis_index("program")
    multiply = partial(products, ring, inputs, arrived)

    # Before the copies, behind which they would wait.
    splits = _splits(parts, lses, filled, number, plan)
    y, factor = vector(hidden), offset + vector(scale)
    own = vector(router.at[number])
    blocks, rows_of_part = plan.width // COLUMNS, plan.inputs // plan.parts
    part, columns = jax.lax.div(number, blocks), pl.ds(jax.lax.rem(number, blocks) * COLUMNS, COLUMNS)
    for i in range(plan.project_tiles):
        at = pl.ds(part * rows_of_part + i * ROWS, ROWS), columns
        plgpu.copy_gmem_to_smem(projection.at[at], ring.at[i], arrived.at[i])
    attended[pl.ds(number * plan.columns, plan.columns)] = _combine(splits, room, plan)
    signal(counters, COMBINED)

    wait(counters, COMBINED, PROGRAMS)
    put(vector(attended.at[pl.ds(part * rows_of_part, rows_of_part)]), inputs)
    (sums,) = multiply(1, plan.project_tiles, lambda i, _: (i, i, None))
    projected[part, columns] = sums
    signal(counters, PROJECTED)

    wait(counters, PROJECTED, PROGRAMS)
    more = vector(projected.at[0])
    for i in range(1, plan.parts):
        more += vector(projected.at[i])
    y = (y + more.astype(total.dtype).astype(jnp.float32)).astype(total.dtype)

    @pl.when(number == 0)
    def _():
        total[...] = y

    y = y.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.sum(y * y) / plan.width + eps) * factor).astype(total.dtype)
    logits[number] = jnp.sum(own * y.astype(jnp.float32))
    signal(counters, ROUTED)
    put(y, inputs)

    wait(counters, ROUTED, PROGRAMS)
    place, mine = jax.lax.div(number, plan.each), jax.lax.rem(number, plan.each)
    expert = _chosen(logits, room, place)
    copy = partial(fetch, (gate, up, down), ring, arrived, expert, mine, plan)
    for t in range(SLOTS):
        copy(jnp.int32(t))
    share = _share(logits, room, place, plan.per_token, normalize)

    @pl.loop(0, plan.gate_blocks)
    def _(u):
        columns, part = gate_block(mine, u, plan)

        def tile(i, which):
            t = 2 * (u * plan.share_tiles + i) + which
            return slot_of(t), part * plan.share_tiles + i, lambda: copy(t + SLOTS)

        for which, sums in enumerate(multiply(2, plan.share_tiles, tile)):
            halves[place, part, which, columns] = sums

    signal(counters, GATED + place)

    wait(counters, GATED + place, plan.each)
    gates, ups = (_sum([halves.at[place, i, which] for i in range(plan.shares)]) for which in range(2))
    put(gates / (1 + jnp.exp(-gates)) * ups, inputs)

    @pl.loop(0, plan.down_blocks)
    def _(u):
        def tile(i, _):
            t = plan.gate_tiles + u * plan.down_tiles + i
            return slot_of(t), i, lambda: copy(t + SLOTS)

        (sums,) = multiply(1, plan.down_tiles, tile)
        rows[place, pl.ds((mine * plan.down_blocks + u) * COLUMNS, COLUMNS)] = sums * share


# --- splits and experts ---


def _sum(refs):
    first, *others = map(vector, refs)
    return sum(others, first)


def _splits(parts, lses, filled, number, plan):
    """Some columns of a query head, of all of its splits: values, logarithms, and how many there are."""
    programs = PROGRAMS // (plan.kv_heads * plan.queries)
    head, columns = jax.lax.div(number, programs), jax.lax.rem(number, programs) * plan.columns
    kv_head, query = jax.lax.div(head, plan.queries), jax.lax.rem(head, plan.queries)
    starts = [pl.ds(i, 64) for i in range(0, plan.splits, 64)]
    at = [parts.at[kv_head, rows, query, pl.ds(columns, plan.columns)] for rows in starts]
    values = [load(ref, FULL, optimized=False) for ref in at]
    logarithms = [load(lses.at[kv_head, rows, query], ALONG_ROWS, optimized=False) for rows in starts]
    return values, logarithms, filled[kv_head]


def _combine(splits, room, plan):
    """The splits by their shares of the whole sum. What an empty split has is never multiplied: it may be NaN."""
    values, logarithms, count = splits
    for i, logarithm in enumerate(logarithms):
        number = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ALONG_ROWS) + 64 * i
        room[pl.ds(64 * i, 64)] = jnp.where(number < count, logarithm, -jnp.inf)
    logarithm = vector(room.at[pl.ds(0, plan.splits)], plan.splits)
    peak = jnp.max(logarithm)
    weight = jnp.exp((logarithm - jnp.where(peak == -jnp.inf, 0.0, peak)) * math.log(2))
    whole = jnp.sum(weight)
    room[pl.ds(0, plan.splits)] = weight / jnp.where(whole > 0, whole, 1.0)
    mixed = []
    for i, value in enumerate(values):
        share = load(room.at[pl.ds(64 * i, 64)], ALONG_ROWS, optimized=False)
        share = jax.lax.broadcast_in_dim(share, value.shape, (0,))
        mixed.append(jnp.where(share > 0, value, 0.0) * share)
    return jnp.sum(sum(mixed[1:], mixed[0]), axis=0)


def _chosen(logits, ranks, place):
    """The expert at this place among the best, of equal ones the first; leaves the places of all."""
    count, starts = logits.shape[0], range(0, logits.shape[0], 64)
    rivals = [load(logits.at[pl.ds(j, 64)], ALONG_COLUMNS, optimized=False) for j in starts]
    owns = [load(logits.at[pl.ds(i, 64)], ALONG_ROWS, optimized=False) for i in starts]
    number, other = (plgpu.broadcasted_iota(jnp.int32, (64, 64), axis, layout=FULL) for axis in (0, 1))
    earlier = other < number
    for i, own in zip(starts, owns, strict=True):
        ahead = []
        for j, rival in zip(starts, rivals, strict=True):
            mine, its = (jax.lax.broadcast_in_dim(x, (64, 64), (axis,)) for axis, x in enumerate((own, rival)))
            before = its > mine if j > i else its >= mine if j < i else (its > mine) | ((its == mine) & earlier)
            ahead.append(jnp.where(before, 1.0, 0.0))
        ranks[pl.ds(i, 64)] = jnp.sum(sum(ahead[1:], ahead[0]), axis=1)
    rank = vector(ranks.at[pl.ds(0, count)], count)
    number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=spread(count)).astype(jnp.float32)
    return jnp.sum(jnp.where(rank == place.astype(jnp.float32), number, 0.0)).astype(jnp.int32)


def _share(logits, ranks, place, per_token, normalize):
    """The share of the expert at this place."""
    rank, value = vector(ranks.at[pl.ds(0, logits.shape[0])], logits.shape[0]), vector(logits)
    part = jnp.exp(value - jnp.max(value))
    share = jnp.sum(jnp.where(rank == place.astype(jnp.float32), part, 0.0))
    return share / jnp.sum(jnp.where(rank < per_token, part, 0.0) if normalize else part)
