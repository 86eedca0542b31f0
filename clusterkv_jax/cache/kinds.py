"""What each kind of a layer's cache does in a way of its own: whoever calls these need not know the kind."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped
from typing_extensions import TypeIs

from clusterkv_jax.cache import layers, pages
from clusterkv_jax.cache.layers import Group, HeadGroups, HeadSlots, Layer, LayerCache, PagedHeads, WindowCache
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import CacheDtype

AnyGroup = TypeVar("AnyGroup", LayerCache, PagedHeads)


def is_compressible(layer: Layer) -> TypeIs[LayerCache | HeadGroups | PagedHeads]:
    """Whether methods see the layer; a window drops its rows itself."""
    return not isinstance(layer, WindowCache)


def is_part(node: Any) -> bool:
    """Whether a node of a tree is a group of heads or a window: for `is_leaf`."""
    return isinstance(node, LayerCache | PagedHeads | WindowCache)


def with_groups(layer: Layer, parts: Sequence[Any]) -> Layer:
    """The layer with other groups in the place of its own (`layers.groups`)."""
    if isinstance(layer, WindowCache):
        return replace(layer, rows=parts[0])
    return replace(layer, groups=tuple(parts)) if isinstance(layer, HeadGroups) else parts[0]


def group_arrays(layer: Layer) -> tuple[tuple[int, ...], ...] | None:
    """The KV heads of each group that has arrays of its own; None where all heads stand in the same arrays."""
    return layer.heads if isinstance(layer, HeadGroups) else None


def head_slots(layer: Layer) -> HeadSlots | None:
    """Heads of equal budgets and their slots, where they stand in pages by their budgets; None elsewhere."""
    return layer.head_slots if isinstance(layer, PagedHeads) else None


def in_pages(layer: Layer) -> TypeGuard[PagedHeads]:
    """Whether heads stand in pages by their budgets."""
    return head_slots(layer) is not None


def first_pages(layer: Any) -> Any:
    """The first page of each head, [B,K]; None where heads have slots of their own."""
    return layer.first if isinstance(layer, PagedHeads) else None


def never_fills(layer: Any) -> bool:
    """Whether any number of tokens may follow, whatever the method does: a ring of a whole window."""
    return isinstance(layer, WindowCache) and layer.rows.capacity == layer.window


def splits_slots(part: Any, appended: bool) -> bool:
    """Whether devices may share the slots of a head: those of a window always, of rows where steps only append to
    them, of pages never.
    """
    return isinstance(part, WindowCache) or (isinstance(part, LayerCache) and appended)


def store(group: Group, capacity: int, name: CacheDtype | None, *, less_mean: bool) -> Group:
    """A group in so many slots, of this type; pages have theirs already."""
    if isinstance(group, PagedHeads):
        return pages.quantised(group, name, less_mean=less_mean)
    return layers.quantised(layers.resize(group, capacity), name, less_mean=less_mean)


def slots_by_head(group: Any) -> int | Int[Array, "B K"]:
    """Slots of each head; the mean of heads that share them."""
    if not isinstance(group, PagedHeads):
        return group.capacity
    return math.prod(group.degree.shape[1:]) // group.length.shape[1] if group.head_slots is None else group.capacity


def rows_by_head(group: Group) -> Int[Array, "B heads"]:
    """Rows of each head; their mean alone, [B,1], where heads share their slots."""
    return rows_held(group)[:, None] if isinstance(group, PagedHeads) and group.head_slots is None else group.length


def rows_held(group: Group) -> Int[Array, " B"]:
    """Rows per head, as they count against the budget: all heads hold equally many, those in pages on the average."""
    if isinstance(group, PagedHeads):
        return jnp.sum(group.length, axis=1) // group.length.shape[1]
    return group.length[:, 0]


def of_slots(group: Group, of_heads: Shaped[Array, "B K ..."]) -> Shaped[Array, "B _ ..."]:
    """What belongs to heads, for each block of slots that a group's arrays have: of pages that of their head."""
    if not isinstance(group, PagedHeads):
        return of_heads
    owners = pages.owners(group)
    return jnp.take_along_axis(of_heads, owners.reshape(*owners.shape, *[1] * (of_heads.ndim - 2)), axis=1)


def numbered(group: Group, first: Int[Array, "B K 1"]) -> Int[Array, "B _ C"]:
    """Numbers of the rows of each head from `first` on, where the rows stand."""
    if isinstance(group, PagedHeads):
        return pages.numbers_in_pages(first + ordinals(group.degree[0].size, 3), group)
    return first + ordinals(group.capacity, 3)


def append(
    group: AnyGroup,
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    *,
    apart: bool = False,
) -> AnyGroup:
    """Write the real ones of T new tokens behind the rows of a group; arguments as in `layers.append`."""
    new = keys, values, positions, real
    return pages.append(group, *new) if isinstance(group, PagedHeads) else layers.append(group, *new, apart=apart)


def append_scored(
    group: AnyGroup,
    scores: Float[Array, "B _ C"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    new_scores: Float[Array, "B K T"],
    *,
    apart: bool = False,
) -> tuple[AnyGroup, Any]:
    """`append` of tokens with scores, behind those of the rows there are."""
    args = scores, keys, values, positions, real, new_scores
    if isinstance(group, PagedHeads):
        return pages.append_scored(group, *args)
    return layers.append_scored(group, *args, apart=apart)


def side_by_side(layer: Any, most: int) -> Any:
    """The layer with heads in slots of their own, `most` at most, where they share pages."""
    return pages.from_pages(layer, min(most, layer.degree[0].size)) if isinstance(layer, PagedHeads) else layer


def alike(layer: Any, *, shape_alone: bool = False) -> Any:
    """The layer as if all heads in its pages had the most slots of any: layers of one shape share a program then.

    With `shape_alone` each might have all slots, for programs that need not know the most.
    """
    if not isinstance(layer, PagedHeads) or (slots := pages.most_slots(layer)) is None:
        return layer
    slots = layer.degree.shape[1] * layer.degree.shape[2] if shape_alone else slots
    return replace(layer, head_slots=((tuple(range(layer.length.shape[1])), slots),))


def as_it_was(layer: Any, before: Any) -> Any:
    """What became of an `alike` layer, with the slots that its heads had before."""
    return replace(layer, head_slots=before.head_slots) if isinstance(layer, PagedHeads) else layer
