"""The first guess of a step of K-means on Hopper: as `first_guess_triton`, with products and comparisons at once.

With Triton all warps of a program wait for its product and then compare. Here warpgroups do not wait for each other,
each fetches tiles of 64 keys of its own: one compares while another's product is under way.

Arithmetic: 2 C D per key. Bytes: every key once for each group of centroids that fits into shared memory.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.hopper import load
from clusterkv_jax.kernels.kmeans.first_guess_triton import BASE, BASE_BITS, STEP

TILE = 64  # keys of a product, the height of the matrix unit's
# Centroids of a product, and those of width 128 that a program holds; columns of the best two; warpgroups, and tiles of
# keys in the ring of each; programs, one for each multiprocessor.
SIZES = {"block": 104, "held": 448, "columns": 8, "warpgroups": 3, "depth": 2, "programs": 132}


def groups(count: int, width: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Centroids of a product and of a group: groups as equal as can be, and products within a group.

    At least two to a column, so that each has a second best.
    """
    each = pl.cdiv(count, pl.cdiv(count, sizes["held"] * 128 // width))
    products = pl.cdiv(each, sizes["block"])
    block = max(2 * sizes["columns"], pl.cdiv(pl.cdiv(each, products), 8) * 8)
    return block, block * products


def first_guess(
    keys: Float[Array, "H N D"],
    norms: Float[Array, "H N"],
    heads_of: Float[Array, "H C D"],
    tail_norm: Float[Array, "H C"],
    end: Int[Array | np.ndarray, " H"],
    present: Int[Array | np.ndarray, " H"],
    shape: tuple[int, int],
    sizes: dict[str, int],
    interpret: Any = False,
) -> Int[Array, "H N"]:
    """Labels of scaled keys by the heads of centroids, as -2 - label where in doubt; -1 at or beyond `end`.

    `shape` as `groups` returns it; C is a multiple of a group. N must be at least 64, and a multiple of 8: keys
    are copied in tiles of so many.
    """
    (heads, rows, _), (block, held) = keys.shape, shape
    chunks = max(1, min(sizes["programs"] // heads, pl.cdiv(rows, TILE * sizes["warpgroups"])))
    sizes = {name: sizes[name] for name in ("columns", "warpgroups", "depth")}
    last = heads_of.shape[1] // held - 1
    state: tuple[Any, ...] = ()
    options: dict[str, Any] = {"interpret": interpret} if interpret else {}
    for group in range(last + 1):
        outputs = 1 if group == last else 3
        state = plgpu.kernel(
            partial(_program, group=group, held=held, block=block, outputs=outputs, chunks=chunks, **sizes),
            out_type=[jax.ShapeDtypeStruct((heads, rows), jnp.int32)] * outputs,
            grid=(heads, chunks),
            grid_names=("head", "chunk"),
            num_threads=sizes["warpgroups"],
            thread_name="wg",
            kernel_name="nearest_at_once",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            **options,
        )(keys, norms, heads_of, tail_norm, end, present, *state)
    return state[0]


def _program(
    keys, norms, heads_of, tail_norm, end, present, *refs, held, block, outputs, warpgroups, depth, **settings
):  # fmt: skip
    """Allocates: centroids that stay, and for each warpgroup a ring of tiles of keys and room for its results."""
    width, before = keys.shape[2], refs[: len(refs) - outputs]
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    arrivals = 2 + len(before)
    pl.run_scoped(
        partial(
            _nearest, (keys, norms, *before), (heads_of, tail_norm), end, present, refs[len(before) :], held=held,
            block=block, warpgroups=warpgroups, depth=depth, **settings
        ),
        plgpu.SMEM((held // block, block, width), jnp.float16, transforms=layout),
        [plgpu.SMEM((warpgroups, depth, TILE, width), jnp.float16, transforms=layout)]
        + [plgpu.SMEM((warpgroups, depth, TILE), x.dtype) for x in (norms, *before)],
        plgpu.SMEM((warpgroups, outputs, TILE), jnp.int32),
        plgpu.Barrier(num_arrivals=held // block),
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=warpgroups * depth),
        collective_axes="wg",
    )  # fmt: skip


def _nearest(
    inputs, centroids, end, present, outputs, held_centroids, ring, results, ready, filled,
    *, group, held, block, columns, warpgroups, depth, chunks,
):  # fmt: skip
    """Every `warpgroups * chunks`-th tile of a head's keys; see `first_guess_triton._nearest` for what is compared."""
    head, chunk, wg = jax.lax.axis_index("head"), jax.lax.axis_index("chunk"), jax.lax.axis_index("wg")
    heads_of, tail_norm = centroids
    all_rows, width, start = outputs[0].shape[1], heads_of.shape[2], group * held
    stop, used = end[head], present[head]
    factor = held | 1
    stride = warpgroups * chunks * TILE
    first = (wg * chunks + chunk) * TILE

    def tiles_before(row):
        return jax.lax.div(jnp.maximum(row - first, 0) + (stride - 1), stride)

    def row_of(i):
        # The last tile of a head begins early enough to end with it; what two tiles hold gets the same label twice.
        return jnp.minimum(first + i * stride, all_rows - TILE)

    def at(i):
        return head, pl.ds(row_of(i), TILE)

    def fetch(i, slot):
        for source, target in zip(inputs, ring, strict=True):
            plgpu.copy_gmem_to_smem(source.at[at(i)], target.at[wg, slot], filled.at[wg * depth + slot])

    def put(values, i):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k, value in enumerate(values):
            results[wg, k] = value
        plgpu.commit_smem()
        for k in range(len(values)):
            plgpu.copy_smem_to_gmem(results.at[wg, k], outputs[k].at[at(i)])

    mine = tiles_before(jnp.where(stop > all_rows - TILE, all_rows, stop))
    for i in range(depth):
        pl.when(i < mine)(partial(fetch, i, i))

    @pl.when(wg == 0)
    def _():
        for i in range(held // block):
            source = heads_of.at[head, pl.ds(start + i * block, block)]
            plgpu.copy_gmem_to_smem(source, held_centroids.at[i], ready)

    needed = 2.01 / STEP * (_largest(tail_norm, head, block) + width * 2.0**-23) * factor
    number = jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0)
    number = plgpu.layout_cast(number, plgpu.Layout.WGMMA.reduce(1))
    plgpu.barrier_wait(ready)

    def body(i, carry):
        slot = jax.lax.rem(i, depth)
        plgpu.barrier_wait(filled.at[wg * depth + slot])
        top, runner = _best_two(ring[0].at[wg, slot], held_centroids, held, block, columns, factor)
        norm, *before = (load(x.at[wg, slot], plgpu.Layout.WGMMA.reduce(1)) for x in ring[1:])
        label = jax.lax.rem(top, factor)
        label = jnp.where(label < 0, label + factor, label) + start
        if before:
            label = jnp.where(top > before[1], label, before[0])
            runner = jnp.maximum(jnp.maximum(runner, before[2]), jnp.minimum(top, before[1]))
            top = jnp.maximum(top, before[1])
        if len(outputs) == 1:
            lead = (top - runner).astype(jnp.float32)
            sure = (lead > needed * norm + 2.0 * factor) & (label < used)
            label = jnp.where(sure, label, -2 - label)
            label = jnp.where(number + row_of(i) < stop, label, -1)
        put((label, top, runner)[: len(outputs)], i)
        pl.when(i + depth < mine)(partial(fetch, i + depth, slot))
        return carry

    jax.lax.fori_loop(0, mine, body, None)

    def none(i, carry):
        put([jnp.minimum(number, -1)] * len(outputs), i)
        return carry

    jax.lax.fori_loop(mine, tiles_before(all_rows), none, None)
    plgpu.wait_smem_to_gmem(0)


def _largest(tail_norm, head, block):
    """The greatest of a head's tails, for each row of a tile."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    parts = [
        load(tail_norm.at[head, pl.ds(i, block)], layout, optimized=False) for i in range(0, tail_norm.shape[1], block)
    ]
    most = parts[0]
    for part in parts[1:]:
        most = jnp.maximum(most, part)
    return jnp.max(jax.lax.broadcast_in_dim(most, (TILE, block), (1,)), axis=1)


def _best_two(key, centroids, held, block, columns, factor):
    """The best and second best centroid of each key of a tile: a product in steps, times `factor`, plus the number."""
    base = (2**31 - BASE_BITS * factor) % 2**32 - 2**31  # as i32, which wraps around
    # Unknown to the compiler, which would keep the addresses of all blocks in registers.
    zero = jax.lax.optimization_barrier(jnp.int32(0))

    found = []
    for i in range(held // block):
        cosine = _product(key, centroids, zero, i)
        # Beside a number this large the last bit of a float32 is a step.
        steps = jax.lax.bitcast_convert_type(cosine + BASE, jnp.int32)
        ranked = [(steps[:, j : j + columns] * factor + (i * block + j + base), None) for j in range(0, block, columns)]
        found = [_tournament(ranked + found)]
    best, second = found[0]
    best += plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, best.shape, 1), plgpu.Layout.WGMMA)
    top = jnp.max(best, axis=1)
    # A number in its place would make integers without a sign of what is chosen.
    assert second is not None
    runner = jnp.max(jnp.where(best == jax.lax.broadcast_in_dim(top, best.shape, (0,)), second, best), axis=1)
    return top, runner


def _product(key, centroids, zero, i):
    """Of a tile of keys with block i of centroids."""

    def program(sums):
        plgpu.wgmma(sums, key, centroids.at[zero + i].transpose((1, 0)))
        return sums[...]

    accumulator = plgpu.ACC((TILE, centroids.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(program, accumulator)


def _tournament(pairs):
    """The best two of several (best, second best), where there may be no second."""
    while len(pairs) > 1:
        met = [_meet(*two) for two in zip(pairs[::2], pairs[1::2], strict=False)]
        pairs = met + pairs[2 * len(met) :]
    return pairs[0]


def _meet(one, other):
    """Five comparisons for two centroids: the greatest of three numbers is one instruction."""
    second = jnp.minimum(one[0], other[0])
    for behind in (one[1], other[1]):
        second = second if behind is None else jnp.maximum(second, behind)
    return jnp.maximum(one[0], other[0]), second
