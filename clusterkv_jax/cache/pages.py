"""Pages: the rows of a layer whose heads hold unequal numbers of them, by their budgets or by what the prompt says.

Three heads that hold 5, 1 and 2 rows, in 6 pages of 4 slots, with room for 2 tokens more in each:

    page       0        1        2        3        4        5
    slots      a a a a  a . . .  b . . .  c c . .  . . . .  . . . .
    head       0        0        1        2        2        2             first = 0 2 3, length = 5 1 2

Shapes are fixed before anything is known of the heads: P pages suffice for every way to spread the rows, and hold at
most S - 1 slots a head more than those rows, and over a mesh as many pages more as its devices divide them. All pages
have an owner, so that decoding never allocates: a token takes its head's next slot. Attention takes every page for a
head of its own and combines what a head's pages found; a GPU reads a head's pages as one row of slots.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from clusterkv_jax.cache.layers import LayerCache, PagedHeads, in_a_row, key_mean, row_slots, take_slots, where_held
from clusterkv_jax.cache.layers import from_pages as from_pages
from clusterkv_jax.kernels.gpu import power_of_two
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
    pages += -pages % ways("pages")
    return _fill(in_a_row(layer), source, keep, (batch, pages, page))


def from_heads(layer: LayerCache, first: Int[Array, "B K"], pages: int, page: int) -> PagedHeads:
    """Heads in equal slots as heads in pages; the caller knows that those of each head have room for its rows."""
    owner, number = _of_pages(first, pages, page)
    held = number < jnp.take_along_axis(layer.length, owner, axis=1)[..., None]
    source = jnp.where(held, owner[..., None] * layer.capacity + number, -1)
    rows = take_slots(in_a_row(layer), source.reshape(len(first), 1, -1))
    every = rows.keys, rows.values, rows.degree, rows.positions
    keys, values, degree, positions = jax.tree.map(lambda x: x.reshape(*source.shape, *x.shape[3:]), every)
    return PagedHeads(keys, values, degree, layer.length, positions, first, layer.key_mean)


def numbers_in_pages(numbers: Shaped[Array, "B K C"], layer: PagedHeads) -> Shaped[Array, "B P S"]:
    """Numbers of the rows of heads, where the rows stand; zeros in empty slots."""
    owner, number = _of_pages(layer.first, *layer.degree.shape[1:])
    of_page = jnp.take_along_axis(numbers, owner[..., None], axis=1)
    at = jnp.minimum(number, numbers.shape[2] - 1)
    return jnp.where(layer.degree > 0, jnp.take_along_axis(of_page, at, axis=2), 0)


def numbers_of_heads(numbers: Shaped[Array, "B P S"], layer: PagedHeads, capacity: int) -> Shaped[Array, "B K C"]:
    """The opposite, in `capacity` slots of each head."""
    at = jnp.minimum(row_slots(layer, capacity), layer.degree[0].size - 1)
    flat = jnp.take_along_axis(numbers.reshape(len(at), -1), at.reshape(len(at), -1), axis=1)
    return jnp.where(ordinals(capacity, 3) < layer.length[..., None], flat.reshape(at.shape), 0)


def reassign(layer: PagedHeads, keep: Bool[Array, "B K C"]) -> PagedHeads:
    """The rows marked in `keep`, row r of a head at keep[..., r], in the same pages, which change their owners."""
    filled_pages = _fill(in_a_row(layer), row_slots(layer, keep.shape[2]), keep, layer.degree.shape)
    return replace(filled_pages, key_mean=layer.key_mean)


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


def most_slots(layer: PagedHeads) -> int | None:
    """Slots that no head has more of, where budgets say how many each has: a power of two, so that layers that differ
    little are alike.
    """
    if layer.head_slots is None:
        return None
    page = layer.degree.shape[2]
    return power_of_two(page * -(-max(slots for _, slots in layer.head_slots) // page))


def owners(layer: PagedHeads) -> Int[Array, "B P"]:
    """The KV head of each page."""
    return _of_pages(layer.first, *layer.degree.shape[1:])[0]


def page_view(layer: PagedHeads) -> LayerCache:
    """Every page as a head of its own, with the rows that it holds."""
    owner, number = _of_pages(layer.first, *layer.degree.shape[1:])
    length = jnp.take_along_axis(layer.length, owner, axis=1) - number[..., 0]
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
    return append_scored(layer, None, keys, values, positions, real, None)[0]


def append_scored(
    layer: PagedHeads,
    scores: Float[Array, "B P S"] | None,
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    new_scores: Float[Array, "B K T"] | None,
) -> tuple[PagedHeads, Float[Array, "B P S"] | None]:
    """`cache.append_scored` for pages."""
    batch, tokens = real.shape
    token = jnp.arange(tokens)
    row = layer.length[..., None] + token[None, None]
    stored = real[:, None] & (row < layer.capacity[..., None])
    slots = jnp.where(stored, row_slots(layer, 1) + row, layer.degree[0].size).reshape(batch, -1)

    # Numbers per row are written by a mask, as in `cache.set_slot`: which token is it that a slot would hold?
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    owner, number = _of_pages(layer.first, *layer.degree.shape[1:])
    number -= jnp.take_along_axis(layer.length, owner, axis=1)[..., None]
    new = (number >= 0) & (number < count[:, None, None])
    wanted = jnp.clip(number, 0, tokens - 1)
    at = jnp.take_along_axis(positions[:, None], wanted, axis=2)

    def put(x: Array, rows: Array) -> Array:
        if x.ndim == 3:  # scales, scores
            of_page = jnp.take_along_axis(rows, owner[..., None], axis=1)
            return jnp.where(new, jnp.take_along_axis(of_page, wanted, axis=2), x)
        flat, rows = x.reshape(batch, -1, x.shape[3]), rows.reshape(batch, -1, x.shape[3]).astype(x.dtype)
        return jax.vmap(lambda x, rows, at: x.at[at].set(rows, mode="drop"))(flat, rows, slots).reshape(x.shape)

    longer = replace(
        layer,
        keys=jax.tree.map(put, layer.keys, as_stored(keys, layer.keys, layer.key_mean)),
        values=jax.tree.map(put, layer.values, as_stored(values, layer.values)),
        degree=jnp.where(new, 1.0, layer.degree),
        length=layer.length + count[:, None],
        positions=jnp.where(new, at, layer.positions),
    )
    return longer, None if scores is None or new_scores is None else put(scores, new_scores)


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


def _of_pages(first: Int[Array, "B K"], pages: int, slots: int) -> tuple[Int[Array, "B P"], Int[Array, "B P S"]]:
    """The KV head of each page, and which row of it would stand in each slot."""
    page = jnp.arange(pages)
    owner = jnp.sum(page[None, :, None] >= first[:, None], axis=-1, dtype=jnp.int32) - 1
    before = (ordinals(pages, 2) - jnp.take_along_axis(first, owner, axis=1)) * slots
    return owner, before[..., None] + ordinals(slots, 3)
