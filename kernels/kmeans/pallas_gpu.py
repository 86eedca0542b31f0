"""A step of K-means on GPU: labels from one fp16 product where that decides, then the keys of each label added up.

1. `_split`, a program per few centroids: each scaled to length 1, as the sum of two fp16 numbers, head and tail (to
   2^-25).
2. `first_guess`: products with the heads, the best and the second best. By Cauchy-Schwarz a product errs by at most
   |key| |tail|, so the best head's label is right where it leads by more than twice that. Keys with a smaller lead,
   some of a hundred, are marked.
3. `_settle`: the marked keys again, with heads and tails.
4. `means_triton`: the keys of each label added up.

A bf16 key is first scaled by a power of two that brings its largest entry to 1 ... 2, which changes no label; it is
then exact in fp16 (to 2^-25 of that entry). `_scale` does so once for all steps. A float32 key is two fp16 numbers too
and goes through all products.

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
from clusterkv_jax.kernels.kmeans.first_guess_triton import SIZES as guess_sizes
from clusterkv_jax.kernels.kmeans.first_guess_triton import first_guess, groups
from clusterkv_jax.kernels.kmeans.means_triton import SIZES as means_sizes
from clusterkv_jax.kernels.kmeans.means_triton import means
from clusterkv_jax.kernels.tuning import blocks

# Keys and centroids of a tile, warps and stages of the programs for keys in doubt (and all float32 keys); keys of a
# program of `_scale`.
SIZES = {"exact_keys": 32, "exact_centroids": 64, "exact_warps": 4, "exact_stages": 2, "scale_keys": 64}
SPLIT = 32  # centroids of a program of `_split`
MOST_CENTROIDS = 8192  # more compile for long: a launch of the first guess for every few hundred


def kmeans(
    keys, centroids, length, used=None, before=None,
    *, with_means, scaled=None, sizes=None, interpret=False,
):  # fmt: skip
    """See `clusterkv_jax.kernels.kmeans.reference.kmeans`; `scaled` as `scaled_keys` returns it."""
    check_dtypes("kmeans", keys)
    batch, heads, rows, dim = keys.shape
    count = centroids.shape[2]
    if power_of_two(dim) > 256 or rows == 0 or count > MOST_CENTROIDS:
        raise NotImplementedError(
            f"The GPU kernel of kmeans takes D up to 256, got {keys.shape} and {count} centroids."
        )
    # Constants, and limits within the kernels: a loop over steps would compute them anew in each.
    end, present, labels = (
        np.full(shape, otherwise, np.int32) if array is None else array.reshape(shape).astype(jnp.int32)
        for array, shape, otherwise in (
            (length, batch * heads, rows),
            (used, batch * heads, count),
            (before, (batch * heads, rows), -1),
        )
    )
    flat = keys.reshape(batch * heads, rows, dim)
    old = centroids.reshape(batch * heads, count, dim).astype(jnp.float32)
    options = SIZES | blocks("kmeans", centroids=count, dim=dim, itemsize=keys.dtype.itemsize) | (sizes or {})
    labels, changed = _labels(flat, scaled, old, end, present, labels, options, interpret)
    if not with_means:
        return labels.reshape(keys.shape[:3])
    change, counts = means(flat, labels, end, old, means_sizes | options, interpret)
    changed = jnp.any(changed > 0, axis=1).reshape(batch, heads)
    return labels.reshape(keys.shape[:3]), change.reshape(centroids.shape), counts.reshape(centroids.shape[:3]), changed


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


def _labels(
    keys, scaled, centroids, end, present, before, sizes, interpret
) -> tuple[Int[Array, "H N"], Int[Array, "H programs"]]:
    """The first nearest of the `present` centroids; at or beyond `end` what was `before`. How many changed."""
    (heads, rows, _), (_, count, dim) = keys.shape, centroids.shape
    shape = groups(count, dim, guess_sizes | sizes)
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
    block = min(sizes["exact_centroids"], power_of_two(count, 16))
    exact = {"block": block, "count": count, "tile": sizes["exact_keys"]}
    settings = {"warps": sizes["exact_warps"], "stages": sizes["exact_stages"], "interpret": interpret}
    if keys.dtype == jnp.float32:
        programs = pl.cdiv(rows, exact["tile"])
        out = of_rows, jax.ShapeDtypeStruct((heads, programs), jnp.int32)
        inputs = (keys, *parts, end, present, before)
        return call(partial(_exact, **exact), out, *inputs, grid=(programs, heads), aliases={5: 0}, **settings)
    scaled = scaled or scaled_keys(keys[None], sizes=sizes, interpret=interpret)
    assert scaled is not None  # keys of 16 bits
    # A program reads all centroids for the few keys in doubt among its rows.
    settled = sizes.get("settle_rows", power_of_two(2 * count, 1024))
    inputs = (scaled[0], scaled[1], parts[0], tail_norm, end, present)
    guess = first_guess(*inputs, shape, guess_sizes | sizes, interpret)
    programs = pl.cdiv(rows, settled)
    labels, changed, _ = call(
        partial(_settle, rows=settled, barrier=not interpret, **exact),
        (of_rows, jax.ShapeDtypeStruct((heads, programs), jnp.int32), of_rows),
        keys,
        *parts,
        present,
        guess,
        before,
        grid=(programs, heads),
        aliases={5: 0},
        **settings,
    )
    return labels, changed


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


def _settle(keys, heads_of, tails_of, present, guess, _, labels, changed, listed, *, rows, tile, barrier, **exact):
    """Labels of `rows` keys: those in doubt are written one behind the other, read again, and compared once more.

    Where there is no guess, labels stay; how many do not is `changed`.
    """
    head, first = pl.program_id(1), pl.program_id(0) * rows
    row = first + arange(rows)
    inside = row < labels.shape[1]
    label = plgpu.load(guess.at[head, row], mask=inside, other=-1)
    label = jnp.where(label < exact["count"], label, -2)  # a zero behind the last centroid
    other = plgpu.load(labels.at[head, row], mask=inside, other=-1) != label
    doubt = (label < -1).astype(jnp.int32)
    place = jnp.where(label < -1, first + jnp.cumsum(doubt) - 1, listed.shape[1])
    plgpu.store(listed.at[head, place], row, mask=label < -1)
    plgpu.store(labels.at[head, row], label, mask=label >= 0)
    end = first + jnp.sum(doubt)
    if barrier:  # other threads of this program read them
        plgpu.debug_barrier()

    def body(i, changes):
        place = first + i * tile + arange(tile)
        row = plgpu.load(listed.at[head, place], mask=place < end, other=labels.shape[1])
        label = _first_nearest(keys, heads_of, tails_of, head, row, place < end, present, **exact)
        return changes + _put(labels, head, row, label, place < end)

    changes = jnp.sum((other & (label >= 0)).astype(jnp.int32))
    changed[head, pl.program_id(0)] = jax.lax.fori_loop(0, pl.cdiv(end - first, tile), body, changes)


def _exact(keys, heads_of, tails_of, end, present, _, labels, changed, *, tile, **exact):
    """Labels of one tile of keys below `end`, and how many changed."""
    head, row = pl.program_id(1), pl.program_id(0) * tile + arange(tile)
    inside = row < jnp.minimum(end[head], keys.shape[1])
    label = _first_nearest(keys, heads_of, tails_of, head, row, inside, present, **exact)
    changed[head, pl.program_id(0)] = _put(labels, head, row, label, inside)


def _put(labels, head, row, label, mask):
    """Write labels; how many were others before."""
    old = plgpu.load(labels.at[head, row], mask=mask, other=0)
    plgpu.store(labels.at[head, row], label, mask=mask)
    return jnp.sum((mask & (old != label)).astype(jnp.int32))


def _first_nearest(keys, heads_of, tails_of, head, row, mask, present, *, block, count):
    """The centroid of highest cosine for each of these keys, of equal ones the first."""
    width, count = heads_of.shape[2], jnp.clip(present[head], 1, count)
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
