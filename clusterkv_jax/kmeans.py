"""Cosine K-means of keys, for all sequences and KV heads at once (ClusterKV section 4.2)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.kmeans import assign, lloyd, prepare_keys
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.control_flow import at_most


def cluster(
    keys: Float[Array, "B K N D"],
    initial_rows: Int[Array, " C"] | Int[Array, "B K C"],
    *,
    max_iterations: int = 20,
    length: Int[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B K C D"], Int[Array, "B K N"], Int[Array, "B K C"]]:
    """Lloyd steps from the keys at `initial_rows`, of each head until no label changes, then one final assignment.

    Args:
        keys: post-RoPE keys. Nearness is the cosine; centroids are means of the keys as they are.
        initial_rows: the rows that the centroids start from, the same for all heads or of each; -1 behind a head's
            last one, where heads have different numbers of clusters.
        max_iterations: the most Lloyd steps.
        length: rows of each head that take part, default all.

    Returns:
        centroids f32; labels, the nearest of these centroids (-1 at or beyond `length`); sizes, the keys of each
        label. A centroid without keys stays where it was.

    Raises:
        ValueError: if `initial_rows` is empty or names no row of the keys, or `max_iterations` is negative.
    """
    if max_iterations < 0:
        raise ValueError(f"max_iterations must be at least 0, got {max_iterations}.")
    _check_rows(initial_rows, keys.shape[2])
    first = jnp.broadcast_to(jnp.asarray(initial_rows), (*keys.shape[:2], initial_rows.shape[-1]))
    count = jnp.sum(first >= 0, axis=-1, dtype=jnp.int32)
    start = jnp.take_along_axis(keys, jnp.maximum(first, 0)[..., None], axis=2).astype(jnp.float32)
    ends = jnp.full(keys.shape[:2], keys.shape[2], jnp.int32) if length is None else length.astype(jnp.int32)
    return _cluster(keys, start, count, ends, max_iterations)


# A program of its own, so that the layers of a decode program share what is traced.
@partial(jax.jit, static_argnums=4)
def _cluster(
    keys: Float[Array, "B K N D"],
    start: Float[Array, "B K C D"],
    count: Int[Array, "B K"],
    ends: Int[Array, "B K"],
    most: int,
) -> tuple[Float[Array, "B K C D"], Int[Array, "B K N"], Int[Array, "B K C"]]:
    """`cluster` from these centroids, the first `count` of each head, over the rows below `ends`."""
    scaled = prepare_keys(keys)

    def move(state):
        """A step of the rows that are left; a head has none any more once nothing changed, so that it stays."""
        centroids, labels, rows = state
        centroids, labels, _, changed = lloyd(keys, centroids, rows, count, labels, scaled=scaled)
        return centroids, labels, jnp.where(changed, rows, 0)

    # -2 is no label: the first step always counts as a change.
    labels = jnp.where(ordinals(keys.shape[2], 3) < ends[..., None], -2, -1).astype(jnp.int32)
    centroids, labels, rows = at_most(most, move, lambda state: jnp.any(state[-1]), (start, labels, ends))
    # Where nothing changed, labels are those of the centroids already.
    labels = assign(keys, centroids, rows, count, labels, scaled=scaled)
    _, starts = group_rows(labels, centroids.shape[2])
    return centroids, labels, starts[..., 1:] - starts[..., :-1]


def _check_rows(initial_rows: Int[Array, "... C"], rows: int) -> None:
    if not initial_rows.shape[-1]:
        raise ValueError("initial_rows must name at least one row, got none.")
    if isinstance(initial_rows, core.Tracer):  # unknown until it runs
        return
    least = 0 if initial_rows.ndim == 1 else -1
    wrong = [int(row) for row in np.ravel(np.asarray(initial_rows)) if not least <= row < rows]
    if wrong:
        raise ValueError(f"initial_rows must be rows of the keys, 0 to {rows - 1}, got {wrong[0]}.")
