"""The rows of the best clusters in plain jnp, as the paper does it: sort, prefix sums, look up."""

import jax.numpy as jnp


def select_rows(scores, sizes, starts, order, room, kept=None, active=None, *, count, sinks=0):
    """See `clusterkv_jax.kernels.select_rows.select_rows`."""
    ranked = jnp.argsort(scores, axis=-1, stable=True, descending=True)
    size, start = (jnp.take_along_axis(x[:, :, None], ranked, axis=-1) for x in (sizes, starts))
    ends = jnp.cumsum(size, axis=-1)
    sinks = min(sinks, count)
    place = jnp.arange(count - sinks, dtype=jnp.int32)
    search = jnp.vectorize(lambda ends: jnp.searchsorted(ends, place, side="right"), signature="(c)->(r)")
    # Beyond the last cluster there is none; what is read there is not used.
    which = jnp.minimum(search(ends), scores.shape[-1] - 1)
    place = place[None, None, None]
    at = place + jnp.take_along_axis(start - (ends - size), which, axis=-1)
    inside = place < jnp.minimum(ends[..., -1:], room[:, None, None, None] - sinks)
    if order is not None:
        at = jnp.take_along_axis(order[:, :, None], jnp.where(inside, at, 0), axis=-1)
    first = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (*at.shape[:3], sinks))
    rows = jnp.concatenate([first, jnp.where(inside, at, -1)], axis=-1)
    return rows if active is None or kept is None else jnp.where(active[:, None, None, None], rows, kept)
