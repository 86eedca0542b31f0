"""The padded, degree-weighted KV cache as pytrees.

One head of one layer, capacity C = 10, after clustering a 20-token prompt to 6 rows and decoding 2 tokens:

    slot       0   1   2   3   4   5   6   7   8   9
    keys       s   s   c   c   r   r   t   t   0   0     s sink, c centroid, r recent, t generated, 0 empty
    degree     1   1   9   7   1   1   1   1   0   0     sums to the 22 tokens seen
    position   0   1   9  17  18  19  20  21   0   0     a centroid stands where its b row stood
    length = 8

`log degree` is at once the attention bias of a centroid and the mask of an empty slot; `length` only bounds the work.
Empty slots hold zeros, so that probability 0 x value never makes a NaN. Shapes never change after prefill.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised import CacheDtype, as_stored, dequantised, quantise
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.runtime.sharding import constrain_batch, fetch, over_heads, over_slots

HeadSlots = tuple[tuple[tuple[int, ...], int], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Rows of one layer, or of one group of its heads.

    Between steps keys and values may both be `Quantised`, which has their shape and no numbers: see `dequantised_rows`.
    Such keys are stored less `key_mean`, if there is one: what the keys of a head have in common, as by the biases of
    some models, would leave the codes nothing for their differences. A softmax does not change by q · mean, the same
    for all rows; the log-sum-exps of `attention` have it added.
    """

    keys: Float[Array, "B K C D"]
    values: Float[Array, "B K C D"]
    degree: Float[Array, "B K C"]
    length: Int[Array, "B K"]
    positions: Int[Array, "B K C"] | None = None
    key_mean: Float[Array, "B K 1 D"] | None = None

    @property
    def capacity(self) -> int:
        """Slots per head, C."""
        return self.keys.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadGroups:
    """A layer whose heads have different capacities: group i holds the KV heads `heads[i]`."""

    groups: tuple[LayerCache, ...]
    heads: tuple[tuple[int, ...], ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedHeads:
    """A layer whose K heads hold unequal numbers of rows and share P pages of S slots.

    A head's pages stand together, from page `first` on, and its rows one behind the other in them (see `pages`).
    `head_slots` are heads of equal budgets and the slots that each of them asks for, where budgets say so and not the
    prompt; its pages have at least as many.
    """

    keys: Float[Array, "B P S D"]
    values: Float[Array, "B P S D"]
    degree: Float[Array, "B P S"]
    length: Int[Array, "B K"]
    positions: Int[Array, "B P S"]
    first: Int[Array, "B K"]
    key_mean: Float[Array, "B K 1 D"] | None = None
    head_slots: HeadSlots | None = field(default=None, metadata={"static": True})

    @property
    def capacity(self) -> Int[Array, "B K"]:
        """Slots of each head."""
        pages, slots = self.keys.shape[1:3]
        return jnp.diff(self.first, append=pages) * slots

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """The KV heads of each budget; all of them where they share one."""
        return tuple(heads for heads, _ in self.head_slots or ((tuple(range(self.length.shape[1])), 0),))

    @property
    def groups(self) -> tuple[LayerCache, ...]:
        """A copy of the heads of each budget in arrays of their own, as `HeadGroups` has them."""
        if self.head_slots is None:
            return (from_pages(self, int(np.max(self.capacity))),)
        return tuple(from_pages(self, slots, jnp.asarray(heads)) for heads, slots in self.head_slots)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowCache:
    """A layer whose tokens see the last `window` alone: its rows, in a ring that no method compresses (`windows`)."""

    rows: LayerCache
    window: int = field(metadata={"static": True})


Group = LayerCache | PagedHeads
Layer = LayerCache | HeadGroups | PagedHeads | WindowCache
# What a method keeps of a group of heads between steps, by name: arrays [B], [B,K], [B,K,C] or [B,K,C,D]. There is none
# where tokens are only ever appended.
State = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The whole model's cache: a tuple over layers, because layers may differ in capacity.

    `state` holds what the method keeps per layer between steps (None where it keeps nothing);
    `position` counts the tokens seen by each sequence, which is the position of its next token.
    """

    layers: tuple[Layer, ...]
    state: tuple[Any, ...]
    position: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """T tokens that enter a layer: the first `count` of each row are real, the others padding.

    `lookup` are the queries that recall methods select rows by: those that this layer makes of what the layer before it
    read, for methods that look ahead; None is `q`. `scores` are what the tokens are worth, for methods that ask for it.
    `sink_logits` are one logit more of each head's softmax: `attention.with_sinks` counts them, once. `degree_power` is
    that of the method whose rows they attend to.
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    lookup: Float[Array, "B T H D"] | None = None
    scores: Float[Array, "B T K"] | None = None
    sink_logits: Float[Array, " H"] | None = None
    rope: Rope | None = field(default=None, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    degree_power: float = field(default=1.0, metadata={"static": True})


def groups(layer: Layer) -> tuple[Any, ...]:
    """The layer's head groups, each of the kind that its method makes; a layer without groups is its own only one."""
    return layer.groups if isinstance(layer, HeadGroups) else (_only_group(layer),)


def _only_group(layer: Any) -> Any:
    return layer.rows if isinstance(layer, WindowCache) else layer


def group_heads(layer: Layer) -> tuple[tuple[int, ...], ...]:
    """The KV heads of each group of `groups(layer)`."""
    return layer.heads if isinstance(layer, HeadGroups) else (tuple(range(_only_group(layer).length.shape[1])),)


def from_tokens(
    keys: Float[Array, "B K N D"], values: Float[Array, "B K N D"], lengths: Int[Array, " B"]
) -> LayerCache:
    """Every real token as a row of degree 1 (C = N); rows at or beyond `lengths` are zeroed, whatever they held."""
    return from_real_tokens(zeroed(keys, lengths), zeroed(values, lengths), lengths)


def zeroed(rows: Float[Array, "B K N D"], lengths: Int[Array, " B"]) -> Float[Array, "B K N D"]:
    """The rows, with zeros at or beyond `lengths`."""
    real = ordinals(rows.shape[2], 2) < lengths[:, None]
    return jnp.where(real[:, None, :, None], rows, jnp.zeros((), rows.dtype))


def from_real_tokens(
    keys: Float[Array, "B K N D"], values: Float[Array, "B K N D"], lengths: Int[Array, " B"]
) -> LayerCache:
    """As `from_tokens`, of rows that are zeros already at or beyond `lengths`: they stay where they lie."""
    batch, heads, rows, _ = keys.shape
    real = jnp.broadcast_to(ordinals(rows, 3) < lengths[:, None, None], (batch, heads, rows))
    return LayerCache(
        keys=keys,
        values=values,
        degree=real.astype(jnp.float32),
        length=jnp.broadcast_to(lengths[:, None], (batch, heads)).astype(jnp.int32),
        positions=jnp.where(real, ordinals(rows, 3), 0),
    )


def resize(layer: LayerCache, capacity: int) -> LayerCache:
    """The same rows in `capacity` slots; the caller knows that no row lies beyond them."""
    every = (layer.keys, layer.values, layer.degree, layer.positions)
    keys, values, degree, positions = jax.tree.map(partial(pad_slots, capacity=capacity), every)
    return replace(layer, keys=keys, values=values, degree=degree, positions=positions)


def pad_slots(x: Shaped[Array, "B K C ..."], capacity: int) -> Shaped[Array, "B K slots ..."]:
    """The first `capacity` slots, zeros behind those there are."""
    extra = capacity - x.shape[2]
    if extra <= 0:
        return x[:, :, :capacity]
    return jnp.pad(x, [(0, 0), (0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 3))


def quantised(layer: LayerCache, name: CacheDtype | None, *, less_mean: bool = True) -> LayerCache:
    """The same rows stored in this type, keys less their mean by default; None leaves them as they are."""
    if name is None:
        return layer
    keys, mean = layer.keys, None
    if less_mean:
        mean = key_mean(jnp.sum(keys, axis=2, dtype=jnp.float32), layer.length)
        keys = where_held(layer, keys.astype(jnp.float32) - mean)
    return replace(layer, keys=quantise(keys, name), values=quantise(layer.values, name), key_mean=mean)


def key_mean(total: Float[Array, "B K D"], count: Int[Array, "B K"]) -> Float[Array, "B K 1 D"]:
    """The mean of so many keys of each head, 0 of none, rounded to 15 bits: sums taken in another order mostly give the
    same mean then, but not where it lies between two such numbers.
    """
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)[..., None]
    return jax.lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=15)[:, :, None]


def where_held(group: Any, keys: Float[Array, "B _ C D"]) -> Float[Array, "B _ C D"]:
    """Keys, with zeros in empty slots."""
    return jnp.where(group.degree[..., None] > 0, keys, 0.0)


def dequantised_rows(layer: LayerCache) -> LayerCache:
    """The same rows in float32 where they are quantised: a copy, for what looks into rows."""
    return replace(layer, keys=key_numbers(layer), values=dequantised(layer.values), key_mean=None)


def key_numbers(layer: LayerCache) -> Float[Array, "B K C D"]:
    """The keys in float32 where they are quantised: a copy."""
    keys = dequantised(layer.keys)
    return keys if layer.key_mean is None else where_held(layer, keys + layer.key_mean)


def select_heads(layer: LayerCache, heads: tuple[int, ...]) -> LayerCache:
    """The cache of these KV heads alone."""
    return jax.tree.map(lambda x: x[:, jnp.asarray(heads)], layer)


def take_rows(
    layer: LayerCache, keep: Bool[Array, "B K C"], capacity: int
) -> tuple[LayerCache, Int[Array, "B K slots"]]:
    """The rows marked in `keep`, in their order, in `capacity` slots (at least as many); and the slots they had."""
    slots = mask_to_slots(keep, capacity)
    return take_slots(layer, slots), slots


def mask_to_slots(keep: Bool[Array, "B K C"], capacity: int) -> Int[Array, "B K slots"]:
    """The numbers of the slots marked in `keep`, in their order, then -1 up to `capacity`."""
    slot = jnp.arange(keep.shape[-1], dtype=jnp.int32)
    # Not less 1: XLA would share the array of ones among layers, and by that fuse all of them: a minute of compiling.
    one = keep.astype(jnp.int32)
    target = jnp.where(keep, jnp.cumsum(one, axis=-1) - one, capacity)
    put = jax.vmap(jax.vmap(lambda to: jnp.full(capacity, -1, jnp.int32).at[to].set(slot, mode="drop")))
    return put(target)


def take_slots(layer: LayerCache, slots: Int[Array, "B K slots"]) -> LayerCache:
    """The rows of these slots, in this order; -1 becomes an empty slot."""
    return _taken(layer, slots, lambda x: _at_slots(x, slots[..., None]))


def _taken(layer: LayerCache, slots: Int[Array, "B K slots"], rows: Callable[[Array], Array]) -> LayerCache:
    """`take_slots`, where `rows` takes those of keys and values."""

    def take(x: Array) -> Array:
        return rows(x) if x.ndim == 4 else _at_slots(x, slots)

    keys, values, degree, positions = jax.tree.map(take, (layer.keys, layer.values, layer.degree, layer.positions))
    return LayerCache(keys, values, degree, jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32), positions, layer.key_mean)


def _at_slots(x: Array, slots: Int[Array, "B K slots ..."]) -> Array:
    return jnp.where(slots >= 0, jnp.take_along_axis(x, jnp.maximum(slots, 0), axis=2), jnp.zeros((), x.dtype))


def from_pages(layer: PagedHeads, capacity: int, heads: Int[Array, " heads"] | None = None) -> LayerCache:
    """All heads, or these, in `capacity` slots each; the caller knows that none holds more rows."""
    slots = jnp.where(ordinals(capacity, 3) < layer.length[..., None], row_slots(layer, capacity), -1)
    mean = layer.key_mean if layer.key_mean is None or heads is None else layer.key_mean[:, heads]
    return replace(take_slots(in_a_row(layer), slots if heads is None else slots[:, heads]), key_mean=mean)


def in_a_row(layer: LayerCache | PagedHeads) -> LayerCache:
    """All slots of a layer as those of one head, for `take_slots`, which looks at no length."""

    def flat(x):
        return x.reshape(x.shape[0], 1, -1, *x.shape[3:])

    assert layer.positions is not None
    keys, values, degree, positions = jax.tree.map(flat, (layer.keys, layer.values, layer.degree, layer.positions))
    return LayerCache(keys, values, degree, layer.length, positions)


def row_slots(layer: PagedHeads, count: int) -> Int[Array, "B K count"]:
    """Where the first `count` rows of each head would stand if all slots stood in a row."""
    return layer.first[..., None] * layer.degree.shape[2] + ordinals(count, 3)


def compact(layer: LayerCache, slots: Int[Array, "B K slots"], *, in_place: bool = True) -> LayerCache:
    """The rows of these slots, an increasing list with -1 behind it, in the first slots; the layer counts them.

    `in_place` they move up where they lie, a part after the other.
    """
    moved = _taken(layer, slots, lambda x: gather_rows(x, slots, in_place=in_place))
    return replace(moved, length=layer.length)


def append(
    layer: LayerCache,
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    *,
    apart: bool = False,
) -> LayerCache:
    """Write the real ones of T new tokens behind the rows there are, as rows of degree 1.

    Tokens of a row are real from the left (`real` is a prefix mask). A token that finds no free slot is not stored,
    but `length` counts it, so that `overflowed` tells. `apart` leaves slots on the devices that share them.
    """
    return append_scored(layer, None, keys, values, positions, real, None, apart=apart)[0]


def append_scored(
    layer: LayerCache,
    scores: Float[Array, "B K C"] | None,
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    new_scores: Float[Array, "B K T"] | None,
    *,
    apart: bool = False,
) -> tuple[LayerCache, Float[Array, "B K C"] | None]:
    """`append` of tokens with scores, behind those of the rows there are; both may be None."""

    def put(
        before: Any,
        held: tuple[LayerCache, Array | None],
        keys: Array,
        values: Array,
        positions: Array,
        real: Array,
        new_scores: Array | None,
    ) -> tuple[LayerCache, Array | None]:
        layer, scores = held
        rows = (layer.keys, layer.values, layer.degree, layer.positions)
        keys, values = as_stored(keys, layer.keys, layer.key_mean), as_stored(values, layer.values)
        # Slots are numbered from those of this device: what comes before or behind them is written elsewhere.
        new = keys, values, positions[:, 0], real[:, 0]
        after = append_rows(*rows, layer.length - before, *new, scores, new_scores)
        length = layer.length + jnp.sum(real, axis=2, dtype=jnp.int32)
        return LayerCache(*after[:3], length, after[3], layer.key_mean), after[4]

    # Positions and `real` are the same for all heads: they get a head axis of size 1, which no mesh splits.
    held, beside = (layer, scores), (keys, values, positions[:, None], real[:, None], new_scores)
    return over_slots(put, held, *beside) if apart else over_heads(partial(put, 0), held, *beside)


def overflowed(cache: KVCache) -> Bool[Array, ""]:
    """True when more tokens were appended than some head has slots for."""
    over: dict[tuple[int, ...], Array] = {}  # layers alike together: a reduction each would be a launch each
    for group in (group for layer in cache.layers for group in groups(layer)):
        here = group.length > group.capacity
        over[here.shape] = over[here.shape] | here if here.shape in over else here
    return jnp.any(jnp.stack([jnp.any(heads) for heads in over.values()]))


def nbytes(cache: KVCache) -> int:
    """Bytes of keys, values and degrees, and of what the method keeps beside them, such as an index."""
    rows = [(x.keys, x.values, x.degree, x.key_mean) for layer in cache.layers for x in groups(layer)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((rows, cache.state)))


def slot_bytes(cache: KVCache) -> int:
    """Bytes of one slot of one head: a key, a value and a degree."""
    group = groups(cache.layers[0])[0]
    rows = jax.tree.leaves((group.keys, group.values, group.degree))
    return sum(math.prod(x.shape[3:]) * x.dtype.itemsize for x in rows)


def occupancy(cache: KVCache, *, windows: bool = False) -> list[list[list[int]]]:
    """Rows held by each KV head, as nested lists [layer][sequence][KV head], of the layers that methods compress; or of
    those with windows.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, WindowCache) == windows]
    # The lengths alone: a cache of gigabytes must not travel to the host for them.
    counts = fetch([[group.length for group in groups(layer)] for layer in layers])
    return [_per_head(layer, np.concatenate(each, axis=1)) for layer, each in zip(layers, counts, strict=True)]


def _per_head(layer: Layer, counts: Int[np.ndarray, "B K"]) -> list[list[int]]:
    """Counts of the heads as they stand in their groups, in the order of the heads."""
    order = [head for heads in group_heads(layer) for head in heads]
    return counts[:, np.argsort(order)].tolist()


def take_sequences(tree: Any, numbers: Int[Array, " R"]) -> Any:
    """A cache, and what stands beside it, whose sequence i is sequence `numbers[i]` of this one: many questions to one
    context, or a smaller batch.
    """
    if all(jax.typeof(x).memory_space != jax.memory.Space.Host for x in jax.tree.leaves(tree)):
        return copy_sequences(tree, numbers)

    def take(x: Array) -> Array:
        if jax.typeof(x).memory_space != jax.memory.Space.Host:
            return x[numbers]
        return jax.device_put(np.asarray(x)[np.asarray(numbers)], x.sharding)

    return jax.tree.map(take, tree)


@jit()
def copy_sequences(tree: Any, numbers: Int[Array, " R"]) -> Any:
    """`take_sequences` of what is on the device; a mesh splits the copies of one sequence too."""
    return jax.tree.map(lambda x: constrain_batch(x[numbers]), tree)
