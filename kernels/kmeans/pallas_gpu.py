"""A step of K-means on GPU: labels from one fp16 product where that decides, then the keys of each label added up.

1. `_split`, a program per few centroids: each scaled to length 1, as the sum of two fp16 numbers, head and tail (to
   2^-25).
2. `first_guess`: products with the heads, the best and the second best. By Cauchy-Schwarz a product errs by at most
   |key| |tail|, so the best head's label is right where it leads by more than twice that. Keys with a smaller lead,
   some of a hundred, are marked. Two kernels: `first_guess_mosaic` on Hopper, elsewhere `first_guess_triton`.
3. `_settle`: the marked keys again, with heads and tails.
4. `group_rows`: the keys by label; `_means`, a program per centroid, reads its keys in that order. The additions are
   float32 in a fixed order, so means are the same in every run.

A bf16 key is first scaled by a power of two that brings its largest entry to 1 ... 2, which changes no label; it is
then exact in fp16 (to 2^-25 of that entry). `_scale` does so once for all steps. A float32 key is two fp16 numbers too
and goes through all products.

Arithmetic: 2 C D per key. Bytes: every key twice. The matrix unit and the comparisons of 2. bound a step.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import device_kind
from clusterkv_jax.kernels.gpu import arange, call, check_dtypes, dot, load_rows, power_of_two
from clusterkv_jax.kernels.group_rows.pallas_gpu import MOST_LABELS, group_rows
from clusterkv_jax.kernels.kmeans import first_guess_triton
from clusterkv_jax.kernels.tuning import blocks

# Keys and centroids of a tile, warps and stages of the programs for keys in doubt (and all float32 keys), and of those
# for the means; keys of a program of `_scale`.
SIZES = {
    **{"exact_keys": 32, "exact_centroids": 64, "exact_warps": 4, "exact_stages": 2},
    **{"mean_keys": 16, "mean_warps": 4, "scale_keys": 64},
}
SPLIT = 32  # centroids of a program of `_split`
HOPPER = ("H100", "H200", "H800")  # in the kinds of its devices, in "GH200" too
FEW = 4096  # keys that are not worth the time it takes to compile for Hopper


def kmeans(
    keys: Float[Array, "B K N D"],
    centroids: Float[Array, "B K C D"],
    length: Int[Array, "B K"] | None,
    used: Int[Array, "B K"] | None = None,
    *,
    with_means: bool,
    scaled: tuple[Float[Array, "H N D"], Float[Array, "H N"]] | None = None,
    first_guess: Any = None,
    sizes: dict[str, int] | None = None,
    interpret: bool = False,
):
    """See `clusterkv_jax.kernels.kmeans.reference.kmeans`; `scaled` as `scaled_keys` returns it.

    `first_guess` is the module that makes it, by default the one that serves this call best.
    """
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
        for given, most in ((length, rows), (None if used is None else jnp.minimum(used, count), count))
    )
    flat = keys.reshape(batch * heads, rows, dim)
    old = centroids.reshape(batch * heads, count, dim).astype(jnp.float32)
    chosen = SIZES | blocks("kmeans", centroids=count, dim=dim, itemsize=keys.dtype.itemsize) | (sizes or {})
    first = first_guess or _first_guess(flat, interpret)
    labels = _labels(flat, scaled, old, end, present, first, chosen, interpret).reshape(batch, heads, rows)
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


def scaled_keys(
    keys: Float[Array, "B K N D"], *, sizes: dict[str, int] | None = None, interpret: bool = False
) -> tuple[Float[Array, "H N D"], Float[Array, "H N"]] | None:
    """fp16 keys times a power of two each, and their lengths: what every step needs of 16-bit keys, H = B K."""
    if keys.dtype == jnp.float32 or power_of_two(keys.shape[-1]) > 256 or keys.shape[2] == 0:
        return None
    flat, sizes = keys.reshape(-1, *keys.shape[2:]), SIZES | (sizes or {})
    rows = flat.shape[1]
    return call(
        partial(_scale, tile=sizes["scale_keys"]),
        (jax.ShapeDtypeStruct(flat.shape, jnp.float16), jax.ShapeDtypeStruct(flat.shape[:2], jnp.float32)),
        flat,
        grid=(pl.cdiv(rows, sizes["scale_keys"]), flat.shape[0]),
        warps=4,
        interpret=interpret,
    )


def _scale(keys, scaled, norms, *, tile):
    """One tile of keys."""
    head, row = pl.program_id(1), pl.program_id(0) * tile + arange(tile)
    columns, mask = arange(power_of_two(keys.shape[2], 16)), row < keys.shape[1]
    (key,), norm = _scaled(load_rows(keys, head, row, columns, mask, keys.shape[2]))
    inside = mask[:, None] & (columns < keys.shape[2])[None, :]
    plgpu.store(scaled.at[head, row[:, None], columns[None, :]], key, mask=inside)
    plgpu.store(norms.at[head, row], norm, mask=mask)


def _labels(keys, scaled, centroids, end, present, first, sizes, interpret) -> Int[Array, "H N"]:
    """The first nearest of the `present` centroids; -1 at or beyond `end`."""
    (heads, rows, _), (_, count, dim) = keys.shape, centroids.shape
    shape = first.groups(count, dim, first.SIZES | sizes)
    padded = pl.cdiv(count, shape[1]) * shape[1]
    half = jax.ShapeDtypeStruct((heads, padded, dim), jnp.float16)
    *parts, tail_norm = call(
        _split,
        (half, half, jax.ShapeDtypeStruct((heads, padded), jnp.float32)),
        centroids,
        present,
        grid=(pl.cdiv(padded, SPLIT), heads),
        warps=4,
        interpret=interpret,
    )
    of_rows = jax.ShapeDtypeStruct((heads, rows), jnp.int32)
    exact = {"block": min(sizes["exact_centroids"], power_of_two(count, 16)), "tile": sizes["exact_keys"]}
    settings = {"warps": sizes["exact_warps"], "stages": sizes["exact_stages"], "interpret": interpret}
    if keys.dtype == jnp.float32:
        grid = (pl.cdiv(rows, exact["tile"]), heads)
        return call(partial(_exact, **exact), of_rows, keys, *parts, end, present, grid=grid, **settings)
    scaled = scaled or scaled_keys(keys[None], sizes=sizes, interpret=interpret)
    assert scaled is not None  # keys of 16 bits
    # A program reads all centroids for the few keys in doubt among its rows.
    settled = sizes.get("settle_rows", power_of_two(2 * count, 1024))
    given = (scaled[0], scaled[1], parts[0], tail_norm, end, present)
    labels = first.first_guess(*given, shape, first.SIZES | sizes, interpret)
    return call(
        partial(_settle, rows=settled, barrier=not interpret, **exact),
        (of_rows, of_rows),
        keys,
        *parts,
        present,
        labels,
        grid=(pl.cdiv(rows, settled), heads),
        aliases={4: 0},
        **settings,
    )[0]


def _first_guess(keys: Float[Array, "H N D"], interpret: bool) -> Any:
    """The module of the first guess: Hopper's where it serves, which takes its time to import, otherwise Triton's."""
    rows, width = keys.shape[1:]
    there = not interpret and any(name in device_kind() for name in HOPPER)
    fits = keys.dtype != jnp.float32 and width in (64, 128) and rows >= FEW and rows % 8 == 0
    if jax.__version_info__ < (0, 11) or not there or not fits:
        return first_guess_triton
    from clusterkv_jax.kernels.kmeans import first_guess_mosaic

    return first_guess_mosaic


def _split(centroids, present, heads_of, tails_of, tail_norm):
    """A few centroids at length 1, each as the sum of two fp16 numbers, and the lengths of the second ones.

    Zeros behind the last that is present: such a one is nearest only to keys that all others point away from.
    """
    number, head = pl.program_id(0) * SPLIT + arange(SPLIT), pl.program_id(1)
    width = centroids.shape[2]
    columns, there = arange(power_of_two(width, 16)), number < jnp.clip(present[head], 1, centroids.shape[1])
    x = load_rows(centroids, head, number, columns, there, width)
    unit = x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1), jnp.finfo(jnp.float32).tiny))[:, None]
    first = unit.astype(jnp.float16)
    rest = unit - first.astype(jnp.float32)
    inside = number < heads_of.shape[1]
    at, mask = (head, number[:, None], columns[None, :]), inside[:, None] & (columns < width)[None, :]
    plgpu.store(heads_of.at[at], first, mask=mask)
    plgpu.store(tails_of.at[at], rest.astype(jnp.float16), mask=mask)
    plgpu.store(tail_norm.at[head, number], jnp.sqrt(jnp.sum(rest * rest, axis=1)), mask=inside)


def _scaled(key: Float[Array, "n D"]) -> tuple[list[Float[Array, "n D"]], Float[Array, " n"]]:
    """Keys times a power of two that brings their largest entry to 1 ... 2, and their lengths then.

    One fp16 array, or two to be added for a float32 key.
    """
    wide = key.astype(jnp.float32)
    peak = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32)
    exponent = jnp.clip(peak >> 23, 1, 253)
    wide *= jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)[:, None]
    parts = [wide.astype(jnp.float16)]
    if key.dtype == jnp.float32:
        parts.append((wide - parts[0].astype(jnp.float32)).astype(jnp.float16))
    return parts, jnp.sqrt(jnp.sum(wide * wide, axis=1))


def _settle(keys, heads_of, tails_of, present, _, labels, listed, *, rows, tile, block, barrier):
    """Labels of the keys in doubt among `rows` keys: their numbers are written one behind the other, and read again."""
    head, first = pl.program_id(1), pl.program_id(0) * rows
    row = first + arange(rows)
    label = plgpu.load(labels.at[head, row], mask=row < labels.shape[1], other=-1)
    doubt = (label < -1).astype(jnp.int32)
    place = jnp.where(label < -1, first + jnp.cumsum(doubt) - 1, listed.shape[1])
    plgpu.store(listed.at[head, place], row, mask=label < -1)
    end = first + jnp.sum(doubt)
    if barrier:  # other threads of this program read them
        plgpu.debug_barrier()

    def body(i, carry):
        place = first + i * tile + arange(tile)
        there = place < end
        row = plgpu.load(listed.at[head, place], mask=there, other=labels.shape[1])
        label = _first_nearest(keys, heads_of, tails_of, head, row, there, present, block)
        plgpu.store(labels.at[head, row], label, mask=there)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(end - first, tile), body, 0)


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
    halves, _ = _scaled(load_rows(keys, head, row, columns, mask, width))

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

    def rows_of(i):
        place = first + i * tile + arange(tile)
        return plgpu.load(order.at[head, place], mask=place < end, other=-1)

    def keys_of(row):
        return load_rows(keys, head, row, columns, row >= 0, width)

    # Numbers are read two tiles ahead and keys one.
    def body(i, state):
        total, key, row = state
        return total + key.astype(jnp.float32), keys_of(row), rows_of(i + 2)

    start = jnp.zeros((tile, columns.shape[0]), jnp.float32), keys_of(rows_of(0)), rows_of(1)
    total = jnp.sum(jax.lax.fori_loop(0, pl.cdiv(end - first, tile), body, start)[0], axis=0)
    mask = columns < width
    stays = plgpu.load(means.at[head, number, columns], mask=mask, other=0.0)
    mean = total / jnp.maximum(end - first, 1).astype(jnp.float32)
    plgpu.store(means.at[head, number, columns], jnp.where(end > first, mean, stays), mask=mask)
