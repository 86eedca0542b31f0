"""Rows by their label in plain jnp: a stable sort."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def group_rows(labels: Int[Array, "B K N"], count: int) -> tuple[Int[Array, "B K N"], Int[Array, "B K ends"]]:
    """See `clusterkv_jax.kernels.group_rows.group_rows`."""
    last = jnp.where(labels < 0, count, labels)
    order = jnp.argsort(last, axis=-1, stable=True).astype(jnp.int32)
    in_order = jnp.take_along_axis(last, order, axis=-1)
    search = jax.vmap(jax.vmap(jnp.searchsorted, (0, None)), (0, None))
    return order, search(in_order, jnp.arange(count + 1, dtype=jnp.int32)).astype(jnp.int32)
