"""Rows by index in plain jnp: the definition, and the path of platforms without a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def gather_rows(
    source: Shaped[Array, "B K N D"],
    rows: Int[Array, "B K R"],
    near: Shaped[Array, "B K M D"] | None = None,
    place: Int[Array, "B K R"] | None = None,
    *,
    in_place: bool = False,
) -> Shaped[Array, "B K R D"]:
    """See `clusterkv_jax.kernels.gather_rows.gather_rows`."""
    del in_place
    far, _ = _take(source, rows)
    if near is None or place is None:
        return far
    result, here = _take(near, place)
    return jnp.where(here, result, far)


def _take(x: Array, rows: Array) -> tuple[Array, Bool[Array, "B K R 1"]]:
    """The rows that there are, zeros for the others; and which there are."""
    count = x.shape[2]
    real = ((rows >= 0) & (rows < count))[..., None]
    if count == 0:
        return jnp.zeros((*rows.shape, x.shape[-1]), x.dtype), real
    values = jnp.take_along_axis(x, jnp.clip(rows, 0, count - 1)[..., None], axis=2)
    return jnp.where(real, values, jnp.zeros((), x.dtype)), real
