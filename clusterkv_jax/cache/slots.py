"""One row of each head, in and out of a slot."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import as_stored


def set_slot(layer: LayerCache, slots: Int[Array, "B K"], row: LayerCache, real: Bool[Array, " B"]) -> LayerCache:
    """The cache with one row per head written to a slot, in sequences that are `real`."""
    at = jnp.where(real[:, None], slots, layer.capacity)

    def one_head(b, r, i):
        return b.at[i].set(r[0].astype(b.dtype), mode="drop", unique_indices=True)

    # Numbers per row are written by a mask: a scatter would have them in another layout, and copied both ways.
    here = ordinals(layer.capacity, 3) == at[..., None]

    def put(x: Array, new: Array) -> Array:
        return jax.vmap(jax.vmap(one_head))(x, new, at) if x.ndim == 4 else jnp.where(here, new, x)

    rows = as_stored(row.keys, layer.keys, layer.key_mean), as_stored(row.values, layer.values), row.degree
    keys, values, degree = jax.tree.map(put, (layer.keys, layer.values, layer.degree), rows)
    before, positions = layer.positions, row.positions
    positions = None if before is None or positions is None else put(before, positions)
    return replace(layer, keys=keys, values=values, degree=degree, positions=positions)


def get_slot(layer: LayerCache, slots: Int[Array, "B K"]) -> LayerCache:
    """One row of each head, as a cache of one slot."""
    every = (layer.keys, layer.values, layer.degree, layer.positions)
    keys, values, degree, positions = get_slots(every, slots[..., None])
    return LayerCache(keys, values, degree, jnp.ones_like(slots), positions)


def get_slots(rows: Any, slots: Int[Array, "B K R"]) -> Any:
    """These slots of a tree of arrays [B,K,C] or [B,K,C,D]."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, slots[..., None] if x.ndim == 4 else slots, axis=2), rows)
