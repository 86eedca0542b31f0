"""Rows by index in plain jnp: the definition, and the path of platforms without a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def gather_rows(source: Shaped[Array, "B K N D"], rows: Int[Array, "B K R"]) -> Shaped[Array, "B K R D"]:
    """See `clusterkv_jax.kernels.gather_rows.gather_rows`."""
    count = source.shape[2]
    if count == 0:
        return jnp.zeros((*rows.shape, source.shape[-1]), source.dtype)
    real = (rows >= 0) & (rows < count)
    taken = jnp.take_along_axis(source, jnp.clip(rows, 0, count - 1)[..., None], axis=2)
    return jnp.where(real[..., None], taken, jnp.zeros((), source.dtype))
