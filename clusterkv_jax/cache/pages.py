"""Pages: the rows of a layer whose heads hold unequal numbers of them, known only when the prompt has been read.

Three heads that hold 5, 1 and 2 rows, in 6 pages of 4 slots, with room for 2 tokens more in each:

    page       0        1        2        3        4        5
    slots      a a a a  a . . .  b . . .  c c . .  . . . .  . . . .
    head       0        0        1        2        2        2             first = 0 2 3, length = 5 1 2

Shapes are fixed before anything is known of the heads: P pages suffice for every way to spread the rows, and hold at
most S - 1 slots a head more than those rows, and over a mesh as many pages more as its devices divide them. All pages
have an owner, so that decoding never allocates: a token takes its head's next slot. Attention takes every page for a
head of its own and combines what a head's pages found.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.layers import LayerCache, PagedHeads, key_mean, take_slots, where_held
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import CacheDtype, as_stored, quantise
from clusterkv_jax.runtime.sharding import ways

# The lanes of a TPU: numbers per row, [B,P,S], take no more memory there than they have.
PAGE = 128


def to_pages(layer: LayerCache, keep: Bool[Array, "B K C"], mean: int, page: int = PAGE) -> PagedHeads:
    """The rows marked in `keep`, in their order, in pages of `page` slots.

    Args:
        layer: of K heads.
        keep: at most K * mean rows of each sequence, however they are spread over its heads.
        mean: rows that a head can come to hold on the average; all heads get equal room for more.
    """
    batch, heads, slots = keep.shape
    source = jnp.broadcast_to(jnp.arange(heads * slots, dtype=jnp.int32).reshape(heads, slots), keep.shape)
    # Heads that need a page for a single row leave the others enough: sum ceil(x / S) <= sum (x + S - 1) / S.
    pages = heads * (mean + page - 1) // page
    pages += -pages % ways("kv_heads")
    return _fill(_in_a_row(layer), source, keep, (batch, pages, page))


def reassign(layer: PagedHeads, keep: Bool[Array, "B K C"]) -> PagedHeads:
    """The rows marked in `keep`, row r of a head at keep[..., r], in the same pages, which change their owners."""
    filled_pages = _fill(_in_a_row(layer), _slots(layer, keep.shape[2]), keep, layer.degree.shape)
    return replace(filled_pages, key_mean=layer.key_mean)


def from_pages(layer: PagedHeads, capacity: int, heads: Int[Array, " heads"] | None = None) -> LayerCache:
    """All heads, or these, in `capacity` slots each; the caller knows that none holds more rows."""
    slots = jnp.where(ordinals(capacity, 3) < layer.length[..., None], _slots(layer, capacity), -1)
    mean = layer.key_mean if layer.key_mean is None or heads is None else layer.key_mean[:, heads]
    return replace(take_slots(_in_a_row(layer), slots if heads is None else slots[:, heads]), key_mean=mean)


def quantised(layer: PagedHeads, name: CacheDtype | None, *, less_mean: bool = True) -> PagedHeads:
    """`cache.quantised` for pages."""
    if name is None:
        return layer
    keys, mean = layer.keys, None
    if less_mean:
        owner = owners(layer)
        mine = (owner[:, None] == ordinals(layer.length.shape[1], 2)[..., None]).astype(jnp.float32)
        sums = jnp.sum(keys, axis=2, dtype=jnp.float32)
        total = jnp.einsum("bkp,bpd->bkd", mine, sums, precision=jax.lax.Precision.HIGHEST)
        mean = key_mean(total, layer.length)
        of_page = jnp.take_along_axis(mean, owner[..., None, None], axis=1)
        keys = where_held(layer, keys.astype(jnp.float32) - of_page)
    return replace(layer, keys=quantise(keys, name), values=quantise(layer.values, name), key_mean=mean)


def owners(layer: PagedHeads) -> Int[Array, "B P"]:
    """The KV head of each page."""
    page = jnp.arange(layer.degree.shape[1])
    return jnp.sum(page[None, :, None] >= layer.first[:, None], axis=-1, dtype=jnp.int32) - 1


def page_view(layer: PagedHeads) -> LayerCache:
    """Every page as a head of its own, with the rows that it holds."""
    length = jnp.take_along_axis(layer.length, owners(layer), axis=1) - _first_rows(layer)
    length = jnp.clip(length, 0, layer.degree.shape[2])
    return LayerCache(layer.keys, layer.values, layer.degree, length, layer.positions)


def append(
    layer: PagedHeads,
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> PagedHeads:
    """`cache.append` for pages."""
    batch, tokens = real.shape
    token = jnp.arange(tokens)
    row = layer.length[..., None] + token[None, None]
    stored = real[:, None] & (row < layer.capacity[..., None])
    slots = jnp.where(stored, _slots(layer, 1) + row, layer.degree[0].size).reshape(batch, -1)

    # Numbers per row are written by a mask, as in `layers.set_slot`: which token is it that a slot would hold?
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    counts = jnp.take_along_axis(layer.length, owners(layer), axis=1)
    number = (_first_rows(layer) - counts)[..., None] + ordinals(layer.degree.shape[2], 3)
    new = (number >= 0) & (number < count[:, None, None])
    wanted = jnp.clip(number, 0, tokens - 1)
    at = jnp.take_along_axis(positions[:, None], wanted, axis=2)

    def put(x: Array, rows: Array) -> Array:
        if x.ndim == 3:  # scales
            of_page = jnp.take_along_axis(rows, owners(layer)[..., None], axis=1)
            return jnp.where(new, jnp.take_along_axis(of_page, wanted, axis=2), x)
        flat, rows = x.reshape(batch, -1, x.shape[3]), rows.reshape(batch, -1, x.shape[3]).astype(x.dtype)
        return jax.vmap(lambda x, rows, at: x.at[at].set(rows, mode="drop"))(flat, rows, slots).reshape(x.shape)

    return replace(
        layer,
        keys=jax.tree.map(put, layer.keys, as_stored(keys, layer.keys, layer.key_mean)),
        values=jax.tree.map(put, layer.values, as_stored(values, layer.values)),
        degree=jnp.where(new, 1.0, layer.degree),
        length=layer.length + count[:, None],
        positions=jnp.where(new, at, layer.positions),
    )


def _fill(
    rows: LayerCache, source: Int[Array, "B K C"], keep: Bool[Array, "B K C"], shape: tuple[int, ...]
) -> PagedHeads:
    """New pages of `shape` [B,P,S] with what `source` names of `rows`, all of them in one head."""
    batch, pages, slots = shape
    length = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    first = _first_pages(length, pages, slots)
    target = jnp.where(keep, first[..., None] * slots + jnp.cumsum(keep, axis=-1) - 1, pages * slots)
    put = jax.vmap(lambda to, source: jnp.full(pages * slots, -1, jnp.int32).at[to].set(source, mode="drop"))
    filled_pages = take_slots(rows, put(target.reshape(batch, -1), source.reshape(batch, -1))[:, None])
    filled_pages = jax.tree.map(
        lambda x: x.reshape(batch, pages, slots, *x.shape[3:]) if x.ndim > 2 else x, filled_pages
    )
    return PagedHeads(
        filled_pages.keys, filled_pages.values, filled_pages.degree, length, filled_pages.positions, first
    )


def _first_pages(length: Int[Array, "B K"], pages: int, slots: int) -> Int[Array, "B K"]:
    """Every head gets pages for its rows and as many more as there can be for all; the last one also what is left."""
    heads = length.shape[1]
    most = ((pages + 1) * slots - 1) // heads - slots + 1  # the highest mean that never needs more pages
    room = most + jnp.sum(-length, axis=1, keepdims=True) // heads
    need = -(-(length + room) // slots)
    return jnp.cumsum(need, axis=1, dtype=jnp.int32) - need


def _in_a_row(layer: LayerCache | PagedHeads) -> LayerCache:
    """All slots of a layer as those of one head, for `take_slots`, which looks at no length."""

    def flat(x):
        return x.reshape(x.shape[0], 1, -1, *x.shape[3:])

    assert layer.positions is not None
    keys, values, degree, positions = jax.tree.map(flat, (layer.keys, layer.values, layer.degree, layer.positions))
    return LayerCache(keys, values, degree, layer.length, positions)


def _slots(layer: PagedHeads, count: int) -> Int[Array, "B K count"]:
    """Where the first `count` rows of each head would stand if all slots stood in a row."""
    return layer.first[..., None] * layer.degree.shape[2] + ordinals(count, 3)


def _first_rows(layer: PagedHeads) -> Int[Array, "B P"]:
    """Which row of its head stands in a page's first slot."""
    first = jnp.take_along_axis(layer.first, owners(layer), axis=1)
    return (ordinals(layer.degree.shape[1], 2) - first) * layer.degree.shape[2]
