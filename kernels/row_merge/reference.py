"""Row merge in plain jnp: the definition, and the path of platforms without a kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import StoredRows, dequantised, row_squares, with_changes
from clusterkv_jax.kernels.top_rows.reference import top_rows


def row_merge(keys, values, degree, rows, length, match, score, merges, squares=(None, None), *, chunk):
    """See `clusterkv_jax.kernels.row_merge.row_merge`."""
    del chunk
    leaves = top_rows(score, merges)
    a_row = jnp.where(leaves, rows[:, :, ::2], 0)
    partner = jnp.where(leaves, jnp.take_along_axis(rows, jnp.maximum(match, 0), axis=2), 0)
    b_row = jnp.where(leaves, partner, degree.shape[2])  # beyond the end: dropped
    weight = jnp.where(leaves, jnp.take_along_axis(degree, a_row, axis=2), 0.0)
    add = jax.vmap(jax.vmap(lambda total, rows, x: total.at[rows].add(x, mode="drop")))
    before, degree = degree, add(degree, b_row, weight)

    def mean(stored: StoredRows) -> StoredRows:
        x = dequantised(stored)
        a, b = (jnp.take_along_axis(x, row[..., None], axis=2).astype(jnp.float32) for row in (a_row, partner))
        total = add(jnp.zeros(x.shape, jnp.float32), b_row, weight[..., None] * (a - b))
        # Slots that are not on the list may hold anything; adding 0 to them keeps it.
        mean = (x.astype(jnp.float32) + total / jnp.maximum(degree, 1.0)[..., None]).astype(x.dtype)
        return with_changes(stored, mean, degree != before)

    keys, values = mean(keys), mean(values)

    def now(known, x):
        return None if known is None else jnp.where(degree != before, row_squares(x), known)

    squares = now(squares[0], keys), now(squares[1], values)
    return keys, values, degree, _close_gaps(rows, length, leaves), squares


def _close_gaps(
    rows: Int[Array, "B K R"], length: Int[Array, "B K"], leaves: Bool[Array, "B K A"]
) -> Int[Array, "B K R"]:
    """The list without the merged A rows."""
    place = ordinals(rows.shape[2], 3)
    gone = jnp.zeros(rows.shape, bool).at[:, :, ::2].set(leaves)
    keep = (place < length[..., None]) & ~gone
    target = jnp.where(keep, jnp.cumsum(keep, axis=-1) - 1, rows.shape[2])
    return jax.vmap(jax.vmap(lambda to, x: jnp.zeros_like(x).at[to].set(x, mode="drop")))(target, rows)
