"""Appending in plain XLA: a scatter for each of the buffers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from clusterkv_jax.kernels.ordinals import ordinals


def append_rows(
    keys, values, degree, positions, length, new_keys, new_values, new_positions, real, scores=None, new_scores=None
):  # fmt: skip
    """See `clusterkv_jax.kernels.append_rows.append_rows`."""
    batch, heads, tokens, _ = new_keys.shape
    slots = length[..., None] + ordinals(tokens, 3)
    slots = jnp.where(real[:, None, :] & (slots >= 0), slots, keys.shape[2])

    def put(buffer: Array, rows: Array) -> Array:
        def one_head(b, r, i):
            return b.at[i].set(r.astype(b.dtype), mode="drop", unique_indices=tokens == 1)

        return jax.vmap(jax.vmap(one_head))(buffer, rows, slots)

    stored = jnp.broadcast_to(new_positions[:, None, :], (batch, heads, tokens))
    return (
        jax.tree.map(put, keys, new_keys),
        jax.tree.map(put, values, new_values),
        put(degree, jnp.ones((batch, heads, tokens), jnp.float32)),
        None if positions is None else put(positions, stored),
        None if scores is None or new_scores is None else put(scores, new_scores),
    )
