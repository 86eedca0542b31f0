"""A step of K-means on GPU: labels from one fp16 product where that decides, then the keys of each label added up.

1. `_split`, a program per few centroids: each scaled to length 1, as the sum of two fp16 numbers, head and tail (to
   2^-25).
2. `_nearest`, a program per tile of keys: products with the heads, the best and the second best. By Cauchy-Schwarz a
   product errs by at most |key| |tail|, so the best head's label is right where it leads by more than twice that. Keys
   with a smaller lead, some of a hundred, are put on a list.
3. `_settle`: the listed keys again, with heads and tails.
4. `group_rows`: the keys by label; `_means`, a program per centroid, reads its keys in that order. The additions are
   float32 in a fixed order, so means are the same in every run.

A bf16 key is first scaled by a power of two that brings its largest entry to 1 ... 2, which changes no label; it is
then exact in fp16 (to 2^-25 of that entry). A float32 key is two fp16 numbers too and goes through all products.

Arithmetic: 2 C D per key. Bytes: every key twice. The matrix unit and the comparisons of 2. bound a step.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.group_rows.pallas_gpu import MOST_LABELS, group_rows
from clusterkv_jax.kernels.tuning import blocks

# Keys and centroids of a tile, warps and stages of the programs for the labels, of those for keys on the list (and all
# float32 keys), and of those for the means.
SIZES = {
    **{"label_keys": 64, "label_centroids": 32, "label_warps": 4, "label_stages": 3},
    **{"exact_keys": 64, "exact_centroids": 64, "exact_warps": 4, "exact_stages": 2},
    **{"mean_keys": 32, "mean_warps": 4},
}
SETTLERS = 64  # programs of a head that share its list
SPLIT = 32  # centroids of a program of `_split`
STEP, BASE = 2.0**-16, 1.5 * 2.0**7  # a product is below 2 sqrt(D) <= 32; a step is the last bit of BASE
BASE_BITS = 0x43400000
LEAST = -(2**30)  # below every product, which has at most 22 bits, of MOST_LABELS / 32 tiles


def kmeans(
    keys: Float[Array, "B K N D"],
    centroids: Float[Array, "B K C D"],
    length: Int[Array, "B K"] | None,
    used: Int[Array, "B K"] | None = None,
    *,
    with_means: bool,
    sizes: dict[str, int] | None = None,
    interpret: bool = False,
):
    """See `clusterkv_jax.kernels.kmeans.reference.kmeans`."""
    check_dtypes("kmeans", keys)
    batch, heads, rows, dim = keys.shape
    count = centroids.shape[2]
    if power_of_two(dim) > 256 or rows == 0 or count > MOST_LABELS:
        raise NotImplementedError(
            f"the GPU kernel of kmeans takes D up to 256, got {keys.shape} and {count} centroids."
        )
    # Constants, and limits within the kernels: a loop over steps would compute them anew in each.
    end, present = (
        np.full((batch * heads,), most, np.int32) if given is None else given.reshape(-1).astype(jnp.int32)
        for given, most in ((length, rows), (used, count))
    )
    flat = keys.reshape(batch * heads, rows, dim)
    old = centroids.reshape(batch * heads, count, dim).astype(jnp.float32)
    chosen = SIZES | blocks("kmeans", centroids=count, dim=dim, itemsize=keys.dtype.itemsize) | (sizes or {})
    labels = _labels(flat, old, end, present, chosen, interpret).reshape(batch, heads, rows)
    if not with_means:
        return labels
    order, starts = group_rows(labels, count, interpret=interpret)
    means = call(
        partial(_means, tile=chosen["mean_keys"]),
        jax.ShapeDtypeStruct(old.shape, jnp.float32),
        flat,
        order.reshape(batch * heads, rows),
        starts.reshape(batch * heads, count + 1),
        old,
        grid=(count, batch * heads),
        warps=chosen["mean_warps"],
        aliases={3: 0},
        interpret=interpret,
    )
    return labels, means.reshape(centroids.shape), starts[..., 1:] - starts[..., :-1]


def _labels(
    keys: Float[Array, "H N D"],
    centroids: Float[Array, "H C D"],
    end: Int[Array | np.ndarray, " H"],
    present: Int[Array | np.ndarray, " H"],
    sizes: dict[str, int],
    interpret: bool,
) -> Int[Array, "H N"]:
    """The first nearest of the `present` centroids; -1 at or beyond `end`."""
    (heads, rows, _), count = keys.shape, centroids.shape[1]
    half = jax.ShapeDtypeStruct(centroids.shape, jnp.float16)
    *parts, tail_norm, none = call(
        _split,
        (half, half, jax.ShapeDtypeStruct((heads, count), jnp.float32), jax.ShapeDtypeStruct((heads,), jnp.int32)),
        centroids,
        grid=(pl.cdiv(count, SPLIT), heads),
        warps=4,
        interpret=interpret,
    )
    of_rows = jax.ShapeDtypeStruct((heads, rows), jnp.int32)
    exact = {"block": min(sizes["exact_centroids"], power_of_two(count, 16)), "tile": sizes["exact_keys"]}
    settings = {"warps": sizes["exact_warps"], "stages": sizes["exact_stages"], "interpret": interpret}
    if keys.dtype == jnp.float32:
        grid = (pl.cdiv(rows, exact["tile"]), heads)
        return call(partial(_exact, **exact), of_rows, keys, *parts, end, present, grid=grid, **settings)
    labels, listed, total = _first_guess(keys, parts[0], tail_norm, end, present, none, sizes, interpret)
    return call(
        partial(_settle, **exact),
        of_rows,
        keys,
        *parts,
        listed,
        total,
        present,
        labels,
        grid=(SETTLERS, heads),
        aliases={6: 0},
        **settings,
    )


def _first_guess(keys, heads_of, tail_norm, end, present, none, sizes, interpret):
    """Labels, and the list of those in doubt with its length for each head."""
    of_rows = jax.ShapeDtypeStruct(keys.shape[:2], jnp.int32)
    return call(
        partial(
            _nearest,
            tile=sizes["label_keys"],
            block=min(sizes["label_centroids"], power_of_two(heads_of.shape[1], 16)),
        ),
        (of_rows, of_rows, jax.ShapeDtypeStruct(none.shape, jnp.int32)),
        keys,
        heads_of,
        tail_norm,
        end,
        present,
        none,
        grid=(pl.cdiv(keys.shape[1], sizes["label_keys"]), keys.shape[0]),
        warps=sizes["label_warps"],
        stages=sizes["label_stages"],
        aliases={5: 2},
        interpret=interpret,
    )


def _split(centroids, heads_of, tails_of, tail_norm, none):
    """A few centroids at length 1, each as the sum of two fp16 numbers, and the lengths of the second ones."""
    number, head = pl.program_id(0) * SPLIT + arange(SPLIT), pl.program_id(1)
    width = centroids.shape[2]
    columns, there = arange(power_of_two(width, 16)), number < centroids.shape[1]
    x = load_rows(centroids, head, number, columns, there, width)
    unit = x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1), jnp.finfo(jnp.float32).tiny))[:, None]
    first = unit.astype(jnp.float16)
    rest = unit - first.astype(jnp.float32)
    at, mask = (head, number[:, None], columns[None, :]), there[:, None] & (columns < width)[None, :]
    plgpu.store(heads_of.at[at], first, mask=mask)
    plgpu.store(tails_of.at[at], rest.astype(jnp.float16), mask=mask)
    plgpu.store(tail_norm.at[head, number], jnp.sqrt(jnp.sum(rest * rest, axis=1)), mask=there)
    none[head] = 0


def _scaled(key: Float[Array, "n D"]) -> list[Float[Array, "n D"]]:
    """Keys times a power of two that brings their largest entry to 1 ... 2: one fp16 array, or two to be added."""
    wide = key.astype(jnp.float32)
    peak = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32)
    exponent = jnp.clip(peak >> 23, 1, 253)
    wide *= jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)[:, None]
    first = wide.astype(jnp.float16)
    return [first, (wide - first.astype(jnp.float32)).astype(jnp.float16)] if key.dtype == jnp.float32 else [first]


def _nearest(keys, heads_of, tail_norm, end, present, none, labels, listed, total, *, tile, block):
    """Labels of one tile of keys by the heads of the centroids: -1 at or beyond `end`. Keys in doubt go on the list.

    The best and second best of every column of the tiles of centroids are kept; the columns meet at the end. What is
    compared are integers: a cosine in steps of STEP, times `tiles`, plus the number of the tile, so that nothing else
    has to be carried along. An odd factor keeps the multiplier busy instead of the units that compare.
    """
    del none  # `total` takes its place
    head, width = pl.program_id(1), heads_of.shape[2]
    count = jnp.clip(present[head], 1, heads_of.shape[1])
    row = pl.program_id(0) * tile + arange(tile)
    inside = row < jnp.minimum(end[head], keys.shape[1])
    columns, column = arange(power_of_two(width, 16)), arange(block)
    key = _scaled(load_rows(keys, head, row, columns, inside, width))[0]
    tiles = pl.cdiv(heads_of.shape[1], block) | 1
    base = (2**31 - BASE_BITS * tiles) % 2**32 - 2**31  # as i32, which wraps around

    # What a product may be off for each unit of the key's length: by the tail, and by the rounding of D additions.
    number, wide = arange(power_of_two(heads_of.shape[1], 16)), key.astype(jnp.float32)
    tails = plgpu.load(tail_norm.at[head, number], mask=number < count, other=0.0)
    off = (jnp.max(tails) + width * 2.0**-23) * jnp.sqrt(jnp.sum(wide * wide, axis=1))
    needed = (2.01 * off / STEP + 2) * tiles

    def body(i, state, *, last=False):
        best, second = state
        number = i * block + column
        there = number < count if last else number >= 0
        cosine = dot(key, load_rows(heads_of, head, number, columns, there, width), (1, 1))
        # Beside a number this large the last bit of a float32 is a step. What is added would be where the product
        # begins to be summed up, and all its terms rounded; not so what is subtracted.
        steps = jax.lax.bitcast_convert_type(cosine - -BASE, jnp.int32)
        ranked = steps * tiles + (i + base)
        if last:
            ranked = jnp.where(there[None, :], ranked, LEAST)
        return jnp.maximum(best, ranked), jnp.maximum(second, jnp.minimum(best, ranked))

    full = (count - 1) // block
    least = jnp.full((tile, block), LEAST, jnp.int32)
    best, second = body(full, jax.lax.fori_loop(0, full, body, (least, least)), last=True)
    top = jnp.max(best, axis=1)
    where = jnp.min(jnp.where(best == top[:, None], column[None, :], block - 1), axis=1)
    lead = top - jnp.max(jnp.where(column[None, :] == where[:, None], second, best), axis=1)
    label = jnp.minimum(jnp.mod(top, tiles) * block + where, count - 1)
    plgpu.store(labels.at[head, row], jnp.where(inside, label, -1), mask=row < labels.shape[1])
    doubt = inside & ~(lead.astype(jnp.float32) > needed)
    many = jnp.sum(doubt.astype(jnp.int32))

    @pl.when(many > 0)
    def _():
        # Programs come in any order, which no label depends on.
        place = plgpu.atomic_add(total, (head,), many) + jnp.cumsum(doubt.astype(jnp.int32)) - 1
        plgpu.store(listed.at[head, jnp.where(doubt, place, listed.shape[1])], row, mask=doubt)


def _settle(keys, heads_of, tails_of, listed, total, present, _, labels, *, tile, block):
    """Labels of the keys on a head's list, each program's share of them."""
    head, first, stride = pl.program_id(1), pl.program_id(0) * tile, SETTLERS * tile

    def body(i, carry):
        place = first + i * stride + arange(tile)
        there = place < total[head]
        row = plgpu.load(listed.at[head, place], mask=there, other=labels.shape[1])
        label = _first_nearest(keys, heads_of, tails_of, head, row, there, present, block)
        plgpu.store(labels.at[head, row], label, mask=there)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(total[head] - first, 0), stride), body, 0)


def _exact(keys, heads_of, tails_of, end, present, labels, *, tile, block):
    """Labels of one tile of keys: -1 at or beyond `end`."""
    head, row = pl.program_id(1), pl.program_id(0) * tile + arange(tile)
    inside = row < jnp.minimum(end[head], keys.shape[1])
    label = _first_nearest(keys, heads_of, tails_of, head, row, inside, present, block)
    plgpu.store(labels.at[head, row], jnp.where(inside, label, -1), mask=row < labels.shape[1])


def _first_nearest(keys, heads_of, tails_of, head, row, mask, present, block):
    """The centroid of highest cosine for each of these keys, of equal ones the first."""
    width, count = heads_of.shape[2], jnp.clip(present[head], 1, heads_of.shape[1])
    columns = arange(power_of_two(width, 16))
    halves = _scaled(load_rows(keys, head, row, columns, mask, width))

    def body(i, best):
        number = i * block + arange(block)
        there = number < count
        centroid = load_rows(heads_of, head, number, columns, there, width)
        cosine = dot(halves[0], centroid, (1, 1))
        cosine += dot(halves[0], load_rows(tails_of, head, number, columns, there, width), (1, 1))
        for rest in halves[1:]:
            cosine += dot(rest, centroid, (1, 1))
        cosine = jnp.where(there[None, :], cosine, -jnp.inf)
        top = jnp.max(cosine, axis=1)
        lowest = jnp.min(jnp.where(cosine == top[:, None], number[None, :], count), axis=1)
        better = top > best[1]
        return jnp.where(better, lowest, best[0]), jnp.where(better, top, best[1])

    start = (jnp.zeros(row.shape, jnp.int32), jnp.full(row.shape, -jnp.inf, jnp.float32))
    return jax.lax.fori_loop(0, pl.cdiv(count, block), body, start)[0]


def _means(keys, order, starts, old, means, *, tile):
    """The mean of one centroid's keys; without any it stays."""
    del old  # read and written as the output that aliases it
    number, head = pl.program_id(0), pl.program_id(1)
    width = keys.shape[2]
    columns = arange(power_of_two(width, 16))
    first, end = starts[head, number], starts[head, number + 1]

    def body(i, total):
        place = first + i * tile + arange(tile)
        row = plgpu.load(order.at[head, place], mask=place < end, other=0)
        return total + load_rows(keys, head, row, columns, place < end, width).astype(jnp.float32)

    zeros = jnp.zeros((tile, columns.shape[0]), jnp.float32)
    total = jnp.sum(jax.lax.fori_loop(0, pl.cdiv(end - first, tile), body, zeros), axis=0)
    mask = columns < width
    stays = plgpu.load(means.at[head, number, columns], mask=mask, other=0.0)
    mean = total / jnp.maximum(end - first, 1).astype(jnp.float32)
    plgpu.store(means.at[head, number, columns], jnp.where(end > first, mean, stays), mask=mask)
