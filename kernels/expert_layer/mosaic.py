"""The launch of `expert_layer` for Hopper.

    grid (programs and KV heads,)   all of them at once, one on a multiprocessor

A program has its part of every step. It waits for others by counters in memory where a step needs what they made: the
heads, attention's splits, the output projection, the router's logits, gate and up.
Between launches the memory would rest while one ends and the next one begins. Here copies run ahead of the products,
through a ring of tiles in shared memory: rows of the cache while the heads are made, tiles of the output projection
while programs attend, those of down while gate and up go on. What a program reads or signals waits behind the
copies that it has begun, so those of the next step begin behind the signal. Behind the programs there is one for each
KV head: the token attends to itself there, and enters the cache.

Programs that did not run at once would wait for ever. So there are no more than multiprocessors, and nothing that
decodes has two such launches side by side. Two processes must not decode on one GPU under MPS, which runs both at once.

Code that runs once comes from memory too, slower than weights: loops are not unrolled, and a copy stands in few places.

Bytes: the weights of the heads, of the projection and of the chosen experts, and the cache, once. Bound: reads, and
five times of waiting.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import div, rem

from clusterkv_jax.kernels.expert_layer import Weights
from clusterkv_jax.kernels.expert_layer.attention import (
    Span,
    append,
    attend,
    attend_token,
    combine,
    held_by,
    load_halves,
    load_heads,
    turned,
    weigh,
)
from clusterkv_jax.kernels.expert_layer.copies import Here, Rings, feed_heads, feed_projection, feed_rows
from clusterkv_jax.kernels.expert_layer.experts import chosen, fetch, gate_block, share_of
from clusterkv_jax.kernels.expert_layer.plan import (
    ADDED,
    ATTENDED,
    BLOCK,
    COLUMNS,
    GATED,
    PROGRAMS,
    PROJECTED,
    ROUTED,
    ROWS,
    SLOTS,
)
from clusterkv_jax.kernels.expert_layer.tiles import (
    ACC,
    COPIED,
    TILED,
    column,
    products,
    put,
    put_columns,
    put_rows,
    slot_of,
    store_apart,
)
from clusterkv_jax.kernels.hopper import load, signal, spread, vector, wait
from clusterkv_jax.kernels.pending import Pending

EARLY = 2  # blocks of rows whose copies begin before the heads are there


def run(plan, hidden, token, angles, weights, buffers, lengths, *, heads, normalize, eps, offset):
    """See `clusterkv_jax.kernels.expert_layer.expert_layer`, of shapes that make this plan."""
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    results = {
        "projected": wide(plan.head_parts, plan.dim, plan.kv_heads * (plan.queries + 2)),
        "parts": wide(plan.kv_heads, plan.splits + 1, plan.dim, plan.queries),
        "lses": wide(plan.kv_heads, plan.splits + 1, COLUMNS, plan.queries),  # equal rows, as registers hold them
        "added": wide(plan.kv_heads, plan.dim // COLUMNS, plan.width),
        "total": jax.ShapeDtypeStruct((plan.width,), hidden.total.dtype),
        "logits": wide(plan.experts),
        "halves": wide(plan.per_token, plan.shares, 2, plan.units),
        "outputs": wide(plan.per_token, plan.width),
        "counters": jax.ShapeDtypeStruct(hidden.counters.shape, jnp.int32),
    }
    weights = weights._replace(projection=weights.projection.reshape(-1, plan.dim, plan.width))
    given = (hidden.total, hidden.outputs, *angles, *token, *weights)
    groups = tuple((*group, length) for group, length in zip(buffers, lengths, strict=True))
    changed, tree = jax.tree.flatten((hidden.counters, groups))
    settings = {"plan": plan, "heads": heads, "normalize": normalize, "eps": eps, "offset": offset}
    launch = plgpu.kernel(
        partial(_program, tree=tree, given=len(given), names=tuple(results), **settings),
        out_type=list(results.values()),
        grid=(PROGRAMS + plan.kv_heads,),
        grid_names=("program",),
        kernel_name="expert_layer",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    changed, values = _changing(changed, lambda changed: launch(*given, *changed), list(results.values()))
    out = dict(zip(results, values, strict=True))
    _, groups = jax.tree.unflatten(tree, changed)
    after = Pending(out["total"], out["outputs"], out["counters"])
    return after, tuple(group[:4] for group in groups), tuple(group[4] for group in groups)


def _changing(changed, launch, results):
    """`launch` of arrays that change where they lie, and its results: an array that is only read might be shared."""

    def body(state):
        changed, outs = state
        for out, value in zip(outs, launch(changed), strict=True):
            out[...] = value

    return pl.run_state(body)((changed, [jnp.zeros(x.shape, x.dtype) for x in results]))


def _program(*refs, tree, given, names, plan, **settings):
    """Allocates: a ring of tiles, seen as each of its kinds; the token's inputs of a product; room for numbers; biases
    of slots; the token's row; barriers for each tile of one copy, and of two.
    """
    state, outs = refs[given : given + tree.num_leaves], refs[given + tree.num_leaves :]
    counters, buffers = jax.tree.unflatten(tree, state)
    dtype, most = refs[0].dtype, max(plan.part_tiles * ROWS, plan.width, plan.units)
    span = max(plan.span(degree.shape[2]) for _, _, degree, *_ in buffers)
    tiles = lambda *shape, transforms=TILED: plgpu.SMEM(shape, dtype, transforms=transforms)  # noqa: E731
    operands = refs[:given], counters, buffers, dict(zip(names, outs, strict=True))
    pl.run_scoped(
        partial(_steps, *operands, plan=plan, **settings),
        plgpu.RefUnion(
            tiles(SLOTS, ROWS, COLUMNS),
            tiles(SLOTS, ROWS // COLUMNS, COLUMNS, COLUMNS),
            tiles(SLOTS, COLUMNS, ROWS),
            tiles(SLOTS, 2, BLOCK, plan.dim, transforms=COPIED),
            tiles(SLOTS, 2, plan.dim // COLUMNS, BLOCK, COLUMNS),
        ),
        tiles(most // ROWS, 8, ROWS),
        plgpu.SMEM((plan.experts,), jnp.float32),
        plgpu.SMEM((span + BLOCK,), jnp.float32),
        plgpu.SMEM((2, plan.dim), dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
    )


def _steps(given, counters, buffers, out, rings, inputs, room, bias, row, *barriers, plan, heads, normalize, **norm):
    """What a program does: its part of the layer, or the token of a KV head."""
    number, weights = jax.lax.axis_index("program"), Weights(*given[6:])
    total, outputs, cos, sin, position, real = given[:6]
    alone = number >= PROGRAMS
    kv_head = jnp.where(alone, number - PROGRAMS, div(number, plan.splits))
    split = jnp.where(alone, plan.splits, rem(number, plan.splits))
    holds = held_by(kv_head, split, buffers, heads, real, plan)
    here = Here(plan, number, None, weights, out, counters, Rings(*rings), inputs, *barriers)

    @pl.when(alone)
    def _():
        _token(replace(here, held=holds()), (cos, sin), row, position[0, 0], **norm)

    @pl.when(~alone)
    def _():
        mine, state, scale, of_router, rest = _make_heads(here, holds, total, outputs, (cos, sin), bias, **norm)
        early = _attend(mine, bias, *rest, **norm)
        state = _add_attention(mine, early, state, total.dtype)
        _route(mine, state, scale, of_router, total.dtype, **norm)
        _through_experts(mine, room, normalize)


def _token(here, angles, row, position, *, eps, offset):
    """The token attends to itself, and enters a KV head."""
    plan, held, out, weights = here.plan, here.held, here.out, here.weights
    scales = [load_halves(x) for x in (weights.q_scale, weights.k_scale)]
    angles = [half for x in angles for half in load_halves(x)]
    wait(here.counters, PROJECTED, PROGRAMS)
    queries = load_heads(out["projected"], held.kv_head * plan.queries)
    values = load_heads(out["projected"], plan.kv_heads * plan.queries)()  # and keys, in the columns before them
    queries = turned(*queries(), scales[0], angles, eps, offset)
    keys = turned(*values, scales[1], angles, eps, offset)
    attend_token(queries, keys, values, held, plan, row, out)
    attended = ATTENDED + held.kv_head
    signal(here.counters, attended)
    pl.when(held.stored)(partial(append, held, position, row))

    wait(here.counters, attended, plan.splits + 1)  # all that need it have read what the head held

    def lengthen(place, keys, values, degree, positions, length):
        del keys, values, degree, positions
        length[0, place] = held.slot + held.enters

    held.of_group(lengthen)


def _make_heads(here, holds, total, outputs, angles, bias, *, eps, offset):
    """A part of the heads' products. Gives what the program's KV head holds; the hidden state; what is loaded before
    the copies, behind which it would wait: the scale of the next norm, a row of the router; and for attention biases,
    scales and angles of queries.
    """
    plan, weights, inputs = here.plan, here.weights, here.inputs
    whole = spread(plan.width)
    y, added = load(total, whole), [load(outputs.at[i], whole) for i in range(plan.per_token)]
    scales = [load(x, whole) for x in (weights.scale, weights.behind)]
    of_router = load(weights.router.at[here.number], whole)
    q_scales, angles = load_halves(weights.q_scale), [half for x in angles for half in load_halves(x)]
    pl.loop(0, SLOTS)(partial(feed_heads, here))
    y = (y.astype(jnp.float32) + sum(added[1:], added[0]).astype(y.dtype).astype(jnp.float32)).astype(y.dtype)
    y = y.astype(jnp.float32)
    put(_normed(y, scales[0], plan, eps, offset), inputs)
    # Where degrees are depends on lengths, which come from memory: the copies would wait for both.
    here = replace(here, held=holds())
    finish_bias = weigh(here.held, plan, bias)
    part, first = here.heads

    @pl.loop(0, plan.head_blocks)
    def _(t):
        def program(sums):
            slot = slot_of(t)
            plgpu.barrier_wait(here.arrived.at[slot])
            plgpu.wgmma(sums, here.rings.heads.at[slot], inputs.at[part].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # all have read the tile
            feed_heads(here, t + SLOTS)
            return column(sums[...])

        block, of_head = first + t, plan.dim // COLUMNS
        rows = pl.ds(rem(block, of_head) * COLUMNS, COLUMNS)
        made = pl.run_scoped(program, ACC((COLUMNS, 8), jnp.float32))
        store_apart(made, here.out["projected"].at[part, rows, div(block, of_head)])

    signal(here.counters, PROJECTED)
    pl.loop(0, EARLY)(partial(feed_rows, here))
    ready = finish_bias()
    return here, y, scales[1], of_router, (ready, q_scales, angles)


def _normed(y, scale, plan, eps, offset):
    factor = jax.lax.rsqrt(jnp.sum(y * y) / plan.width + eps)
    return y * factor * (offset + scale.astype(jnp.float32))


def _attend(here, bias, ready, scales, angles, *, eps, offset):
    """Attention to a split. Gives how many tiles of the output projection are on their way."""
    plan, held, inputs, out = here.plan, here.held, here.inputs, here.out
    wait(here.counters, PROJECTED, PROGRAMS)
    queries = load_heads(out["projected"], held.kv_head * plan.queries)
    pl.loop(EARLY, SLOTS)(partial(feed_rows, here))
    early = SLOTS - jnp.clip(held.count, EARLY, SLOTS)
    pl.loop(0, early)(partial(feed_projection, here))
    for j, x in enumerate(turned(*queries(), scales, angles, eps, offset)):
        put_rows(x, inputs.at[0, :, pl.ds(j * COLUMNS, COLUMNS)])
    plgpu.commit_smem()
    start, holes = ready
    span = Span(plan, held, here.rings.rows, inputs, here.both, bias, start, holes, plan.head_blocks)
    mixed, lse = attend(span, lambda i: feed_rows(here, i + SLOTS))
    split = rem(here.number, plan.splits)
    for j, x in enumerate(mixed):
        out["parts"][held.kv_head, split, pl.ds(j * COLUMNS, COLUMNS)] = x
    out["lses"][held.kv_head, split] = lse
    signal(here.counters, ATTENDED + held.kv_head)
    return early


def _add_attention(here, early, state, dtype):
    """Splits combined, their projection, and the hidden state with that."""
    plan, out = here.plan, here.out
    kv_head, block = here.part
    wait(here.counters, ATTENDED + kv_head, plan.splits + 1)
    combined = combine(out["parts"], out["lses"], kv_head, block, plan)
    pl.loop(early, plan.project_tiles)(partial(feed_projection, here))
    put_columns(combined(), here.inputs)
    tile = lambda i, which: (slot_of(here.before + i * plan.project_blocks + which), i, None)  # noqa: E731
    counts = plan.project_blocks, plan.part_tiles
    for i, sums in enumerate(products(here.rings.weights, here.inputs, here.arrived, *counts, tile)):
        out["added"][kv_head, block, here.outputs(i)] = sums
    signal(here.counters, ADDED)

    wait(here.counters, ADDED, PROGRAMS)
    blocks = range(plan.dim // COLUMNS)
    added = [vector(out["added"].at[i, j]) for i in range(plan.kv_heads) for j in blocks]
    more = sum(added[1:], added[0])
    return (state + more.astype(dtype).astype(jnp.float32)).astype(dtype)


def _route(here, state, scale, of_router, dtype, *, eps, offset):
    """One logit of the router; the norm of the hidden state is what the experts take."""
    out = here.out
    x = _normed(state.astype(jnp.float32), scale, here.plan, eps, offset).astype(dtype).astype(jnp.float32)
    out["logits"][here.number] = jnp.sum(of_router.astype(jnp.float32) * x)
    signal(here.counters, ROUTED)
    put(x, here.inputs)

    @pl.when(here.number == 0)
    def _():
        out["total"][...] = state
        zeros = jnp.zeros(here.counters.shape, jnp.int32)
        out["counters"][...] = plgpu.layout_cast(zeros, spread(here.counters.shape[0]))


def _through_experts(here, room, normalize):
    """A part of one expert: of gate and up, and of its outputs."""
    plan, out, inputs, weights = here.plan, here.out, here.inputs, here.weights
    multiply = partial(products, here.rings.weights, inputs, here.arrived)
    wait(here.counters, ROUTED, PROGRAMS)
    before = here.before + plan.project_tiles
    place, mine = div(here.number, plan.each), rem(here.number, plan.each)
    expert = chosen(out["logits"], room, place)
    tiles = (weights.gate, weights.up, weights.down), here.rings.weights, here.arrived
    copy = partial(fetch, *tiles, expert, mine, plan, before)
    pl.loop(0, SLOTS)(copy)
    share = share_of(out["logits"], room, place, plan.per_token, normalize)

    @pl.loop(0, plan.gate_blocks)
    def _(u):
        columns, part = gate_block(mine, u, plan)

        def tile(i, which):
            t = 2 * (u * plan.share_tiles + i) + which
            return slot_of(before + t), part * plan.share_tiles + i, lambda: copy(t + SLOTS)

        for which, sums in enumerate(multiply(2, plan.share_tiles, tile)):
            out["halves"][place, part, which, columns] = sums

    signal(here.counters, GATED + place)

    wait(here.counters, GATED + place, plan.each)
    halves = [[vector(out["halves"].at[place, i, which]) for i in range(plan.shares)] for which in range(2)]
    gates, ups = (sum(parts[1:], parts[0]) for parts in halves)
    put(gates / (1 + jnp.exp(-gates)) * ups, inputs)

    @pl.loop(0, plan.down_blocks)
    def _(u):
        def tile(i, _):
            t = plan.gate_tiles + u * plan.down_tiles + i
            return slot_of(before + t), i, lambda: copy(t + SLOTS)

        (sums,) = multiply(1, plan.down_tiles, tile)
        out["outputs"][place, pl.ds((mine * plan.down_blocks + u) * COLUMNS, COLUMNS)] = sums * share
