"""The first guess of a step of K-means by a Triton kernel: the nearest centroid where one product decides.

A program holds the heads of as many centroids as fit in shared memory and goes over a few tiles of keys; what does not
fit takes further launches. Arithmetic: 2 C D per key. Bytes: every key once for each group of centroids.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import LEAST_SHARED, arange, call, dot, load_rows, power_of_two, shared_memory

# Keys and centroids of a tile, warps, tiles of keys that a program goes over, and centroids that it holds at most.
SIZES = {"label_keys": 128, "label_centroids": 32, "label_warps": 8, "label_turns": 8, "label_held": 512}
STEP, BASE = 2.0**-16, 1.5 * 2.0**7  # a product is below 2 sqrt(D) <= 32; a step is the last bit of BASE
BASE_BITS = 0x43400000
LEAST = -(2**30) - 2**24  # below every product, which has 22 bits, times its factor; less than 2^31 below


def groups(count: int, width: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Centroids of a tile and of a group: groups as equal as can be, as many in each as one program can hold."""
    block = min(sizes["label_centroids"], power_of_two(count, 16))
    width = power_of_two(width, 16)
    fitting = min(sizes["label_held"], 2**16 // width, shared_memory() // (2 * width) - _tile(sizes))
    most = max(1, fitting // block) * block
    return block, pl.cdiv(pl.cdiv(count, block), pl.cdiv(count, most)) * block


def _tile(sizes: dict[str, int]) -> int:
    """Keys of a tile, which stand in shared memory beside the centroids."""
    return min(sizes["label_keys"], 128 if shared_memory() > LEAST_SHARED else 64)


def first_guess(keys, norms, heads_of, tail_norm, end, present, shape, sizes, interpret=False):
    """Labels of scaled keys by the heads of centroids, as -2 - label where in doubt; -1 at or beyond `end`.

    `shape` as `groups` returns it; C is a multiple of a group.
    """
    (heads, rows, _), (block, held) = keys.shape, shape
    tile = _tile(sizes)
    of_rows = jax.ShapeDtypeStruct((heads, rows), jnp.int32)
    state: tuple[Any, ...] = ()
    for start in range(0, heads_of.shape[1], held):
        # The best two so far are only written where another group follows.
        follows = start + held < heads_of.shape[1]
        state = call(
            partial(_nearest, tile=tile, block=block, start=start, tiles=held // block, turns=sizes["label_turns"]),
            (of_rows,) * (3 if state or follows else 1),
            keys,
            norms,
            heads_of,
            tail_norm,
            end,
            present,
            *state,
            grid=(pl.cdiv(rows, tile * sizes["label_turns"]), heads),
            warps=sizes["label_warps"],
            stages=1,
            aliases={6 + i: i for i in range(len(state))},
            interpret=interpret,
        )
    return state[0]


def _best_two(key, centroids, factor, base):
    """The best and second best rank of each column over tiles of centroids, for each key."""
    best: Any = None
    second: Any = None
    for i, centroid in enumerate(centroids):
        # Beside a number this large the last bit of a float32 is a step. What is added would be where the product
        # begins to be summed up, and all its terms rounded; not so what is subtracted.
        steps = jax.lax.bitcast_convert_type(dot(key, centroid, (1, 1)) - -BASE, jnp.int32)
        ranked = steps * factor + (i * centroid.shape[0] + base)
        if best is None:
            best, second = ranked, jnp.full_like(ranked, LEAST)
        else:
            best, second = jnp.maximum(best, ranked), jnp.maximum(second, jnp.minimum(best, ranked))
    return best, second


def _nearest(keys, norms, heads_of, tail_norm, end, present, *refs, tile, block, start, tiles, turns):
    """Labels of `turns` tiles of keys by the heads of `tiles` tiles of centroids, which stay in shared memory.

    -1 at or beyond `end`, -2 - label where in doubt. The best and second best of every column of the tiles of
    centroids are kept; the columns meet at the end. What is compared are integers: a cosine in steps of STEP, times
    `factor`, plus the centroid's number, so that nothing else has to be carried along. An odd factor keeps the
    multiplier busy instead of the units that compare.
    """
    last = start + tiles * block == heads_of.shape[1]
    labels, *between = refs[len(refs) // 2 :] if start else refs
    before = refs[: len(refs) // 2] if start else ()
    head, first, width = pl.program_id(1), pl.program_id(0) * turns * tile, heads_of.shape[2]
    all_rows, stop, used = labels.shape[1], end[head], present[head]
    columns, column = arange(power_of_two(width, 16)), arange(block)
    centroids = [
        load_rows(heads_of, head, start + i * block + column, columns, column >= 0, width) for i in range(tiles)
    ]
    factor = tiles * block | 1
    base = (2**31 - BASE_BITS * factor) % 2**32 - 2**31  # as i32, which wraps around
    # What a product may be off for each unit of the key's length: by the tail, and by the rounding of D additions.
    number = arange(power_of_two(heads_of.shape[1], 16))
    tails = plgpu.load(tail_norm.at[head, number], mask=number < heads_of.shape[1], other=0.0)
    needed = 2.01 / STEP * (jnp.max(tails) + width * 2.0**-23) * factor

    def rows_of(turn):
        return first + turn * tile + arange(tile)

    def keys_of(turn):
        return load_rows(keys, head, rows_of(turn), columns, (turn < turns) & (rows_of(turn) < all_rows), width)

    def body(turn, key):
        following, row = keys_of(turn + 1), rows_of(turn)
        # What was computed is multiplied out of registers; what was only read would go through shared memory, with a
        # fence at every product.
        key *= (row < stop).astype(key.dtype)[:, None]
        best, second = _best_two(key, centroids, factor, base)
        best += column[None, :]
        top = jnp.max(best, axis=1)
        runner = jnp.max(jnp.where(best == top[:, None], second, best), axis=1)
        label, mask = start + jnp.mod(top, factor), row < all_rows
        norm = plgpu.load(norms.at[head, row], mask=mask, other=0.0)
        if before:
            label_before, top_before, runner_before = (plgpu.load(x.at[head, row], mask=mask, other=0) for x in before)
            label = jnp.where(top > top_before, label, label_before)
            runner = jnp.maximum(jnp.maximum(runner, runner_before), jnp.minimum(top, top_before))
            top = jnp.maximum(top, top_before)
        if last:
            sure = ((top - runner).astype(jnp.float32) > needed * norm + 2 * factor) & (label < used)
            label = jnp.where(row < stop, jnp.where(sure, label, -2 - label), -1)
        plgpu.store(labels.at[head, row], label, mask=mask)
        for x, rank in zip(between, (top, runner), strict=False):
            plgpu.store(x.at[head, row], rank, mask=mask)
        return following

    # Heads without keys cost little: a loop over steps has more and more of them.
    filled = jnp.clip(pl.cdiv(stop - first, tile), 0, turns)
    jax.lax.fori_loop(0, filled, body, keys_of(0))

    def none(turn, carry):
        for x, value in zip((labels, *between), (-1, LEAST, LEAST), strict=False):
            plgpu.store(x.at[head, rows_of(turn)], jnp.full((tile,), value, jnp.int32), mask=rows_of(turn) < all_rows)
        return carry

    jax.lax.fori_loop(filled, turns, none, 0)
