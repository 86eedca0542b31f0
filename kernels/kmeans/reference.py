"""A step of K-means in plain jnp: the definition, and the path of platforms without a kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.ordinals import ordinals

# Rows whose cosines with all centroids exist at once.
TILE = 2048


def unit_rows(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Rows scaled to length 1, in float32; zero rows stay zero."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))


def kmeans(
    keys, centroids, length, used=None, before=None,
    *, with_means, scaled=None,
):  # fmt: skip
    """Labels i32 [B,K,N] as in `clusterkv_jax.kernels.kmeans.assign`.

    With `with_means` also the means f32 [B,K,C,D] of the keys by their label, the centroid where there are none, their
    numbers i32 [B,K,C], and whether any label is not that `before`, bool [B,K].
    """
    batch, heads, rows, dim = keys.shape
    count = centroids.shape[2]
    tile = max(1, min(TILE, rows))
    tiles = -(-rows // tile)
    ends = jnp.full((batch, heads), rows, jnp.int32) if length is None else jnp.minimum(length, rows)
    unit = unit_rows(centroids)
    absent = jnp.zeros((batch, heads, count), bool) if used is None else ordinals(count, 3) >= used[..., None]
    padded = jnp.pad(keys, ((0, 0), (0, 0), (0, tiles * tile - rows), (0, 0)))

    def step(totals, i):
        part = jax.lax.dynamic_slice_in_dim(padded, i * tile, tile, axis=2).astype(jnp.float32)
        real = i * tile + ordinals(tile, 3) < ends[..., None]
        # The length of a key is no matter to which centroid is nearest.
        cosine = jnp.einsum("bkcd,bknd->bkcn", unit, part, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(absent[..., None], -jnp.inf, cosine)
        labels = jnp.where(real, jnp.argmax(cosine, axis=2).astype(jnp.int32), -1)
        if with_means:
            member = (labels[:, :, None] == ordinals(count, 3)[..., None]).astype(jnp.float32)
            part = jnp.where(real[..., None], part, 0.0)
            sums = jnp.einsum("bkcn,bknd->bkcd", member, part, precision=jax.lax.Precision.HIGHEST)
            totals = (totals[0] + sums, totals[1] + jnp.sum(member, axis=-1, dtype=jnp.float32).astype(jnp.int32))
        return totals, labels

    zeros = (jnp.zeros((batch, heads, count, dim), jnp.float32), jnp.zeros((batch, heads, count), jnp.int32))
    totals, labels = jax.lax.scan(step, zeros, jnp.arange(tiles))
    labels = jnp.moveaxis(labels, 0, 2).reshape(batch, heads, tiles * tile)[:, :, :rows]
    labels, changed = kept(labels, before)
    return (labels, means_of(*totals, centroids), totals[1], changed) if with_means else labels


def kept(
    labels: Int[Array, "B K N"], before: Int[Array, "B K N"] | None
) -> tuple[Int[Array, "B K N"], Bool[Array, "B K"]]:
    """Labels, where they are -1 those `before`, and which heads have other labels than before."""
    before = jnp.full_like(labels, -1) if before is None else before
    labels = jnp.where(labels < 0, before, labels)
    return labels, jnp.any(labels != before, axis=-1)


def means_of(
    sums: Float[Array, "B K C D"], sizes: Int[Array, "B K C"], centroids: Float[Array, "B K C D"]
) -> Float[Array, "B K C D"]:
    """The means of what was added up; a centroid without keys stays."""
    means = sums / jnp.maximum(sizes, 1).astype(jnp.float32)[..., None]
    return jnp.where(sizes[..., None] > 0, means, centroids.astype(jnp.float32))
