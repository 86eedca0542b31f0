"""Rows of a recall method in host memory: a step moves those that it recalls and that the device does not hold yet.

    store       keys, values [B, K, C, D]      host    every row that is indexed, at its slot
    resident    keys, values [B, K, S+U, D]    device  the S sinks and the U rows not indexed yet, always attended
    cached      keys, values [B, K, R J n, D]  device  what the last R steps recalled: n rows for each of J selections

A step looks the numbers of its rows up in those of `cached`, gathers what it finds there and the rest from the store,
and attends to that and to `resident`. New rows wait in `resident`, which is read anyway, until an interval of them is
clustered; then they enter the store in place.

On a GPU the store is in `pinned_host` memory, and the kernel of `gather_rows` reads over the host link the rows that
are asked for and no others. A CPU has one memory. A TPU has no such gather.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.cache.attention import attend_cache, combine
from clusterkv_jax.cache.layers import KVCache, LayerCache, State, StepInputs, from_tokens, groups, resize
from clusterkv_jax.cache.slots import set_slot
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.host_memory import to_host
from clusterkv_jax.runtime.sharding import over_heads

# What `state["counts"]` counts for each KV head, from the end of the prompt on.
COUNTS = ("clusters recalled", "of these found on the device", "rows recalled", "of these found on the device")


def place(group: Any, state: Any) -> Any:
    """The group with its rows in the host's memory where its state says that they belong there."""
    if not on_host(state):
        return group
    keys, values, degree = to_host((group.keys, group.values, group.degree))
    return replace(group, keys=keys, values=values, degree=degree)


def commit(tree: Any) -> Any:
    """Arrays bound to the devices that they are on; those of a traced program as they are.

    All that comes out of a program with host memory is bound so. A program whose arguments are so now and were not
    before is compiled a second time, and that of a decode loop takes longer than many of its steps.
    """
    return jax.tree.map(lambda x: x if isinstance(x, core.Tracer) else jax.device_put(x, x.sharding), tree)


def on_host(state: Any) -> bool:
    """Whether the rows of a group with this state are in the host store."""
    return state is not None and "resident_keys" in state


def move_to_host(
    prompt: LayerCache, state: State | None, capacity: int, *, sinks: int, unindexed: int, steps: int
) -> tuple[LayerCache, State]:
    """The store of a prompt that is indexed, and its state with what the device holds.

    Args:
        prompt: every row.
        state: of the method, with `recalled`.
        capacity: slots of the store.
        sinks: S, rows that are always attended to; the first of those in `recalled`.
        unindexed: U, the most rows that are not indexed at any time.
        steps: R, whose recalled rows stay on the device.
    """
    assert state is not None
    batch, heads, each, count = state["recalled"].shape
    resident = resize(resize(prompt, sinks), sinks + unindexed)
    cached = (batch, heads, steps * each * max(count - sinks, 0))
    empty = jnp.zeros((*cached, prompt.keys.shape[-1]), prompt.keys.dtype)
    state = state | {
        "resident_keys": resident.keys,
        "resident_values": resident.values,
        "cached_keys": empty,
        "cached_values": empty,
        "cached_rows": jnp.full(cached, -1, jnp.int32),
        "counts": jnp.zeros((batch, heads, len(COUNTS)), jnp.int32),
    }
    return place(replace(resize(prompt, capacity), positions=None), state), state


def append(group: LayerCache, state: Any, new: StepInputs, *, sinks: int) -> tuple[LayerCache, Any]:
    """One token for each sequence behind the rows there are, on the device.

    Where more than U rows are not indexed, `length` says that there are more rows than slots.
    """
    resident = _resident(group, state, sinks)
    slots = jnp.where(group.length < sinks, group.length, sinks + group.length - state["indexed"][:, None])
    row = from_tokens(jnp.swapaxes(new.k, 1, 2), jnp.swapaxes(new.v, 1, 2), jnp.ones_like(state["indexed"]))
    put = set_slot(resident, slots, row, new.real[:, 0])
    lost = new.real & (slots >= resident.capacity)
    length = jnp.where(lost, group.capacity + 1, group.length + new.real.astype(jnp.int32))
    resident = {"resident_keys": put.keys, "resident_values": put.values}
    return replace(group, length=length), state | resident


def attend(
    group: LayerCache, state: Any, token: StepInputs, rows: Int[Array, "B K J n"], *, sinks: int
) -> tuple[Float[Array, "B 1 H D"], Any]:
    """Queries of one token attend to the rows recalled for them and to those that are resident.

    Rows come cluster after cluster, -1 where there is none; a sequence without any keeps what the device holds.
    """
    q, soft_cap = token.q, token.soft_cap
    names = ("cached_keys", "cached_values", "cached_rows", "starts", "sizes", "order")
    device = {name: state[name] for name in names}
    grouped = q.reshape(q.shape[0], group.length.shape[1], -1, q.shape[-1])
    out, lse, fresh, counts = over_heads(partial(_recall, soft_cap), grouped, group.keys, group.values, device, rows)
    recalled = out.reshape(q.shape), lse.reshape(q.shape[:3])
    both = combine(attend_cache(_resident(group, state, sinks), q, soft_cap), recalled, token.sink_logits)
    return both, state | fresh | {"counts": state["counts"] + counts}


def flush(
    group: LayerCache, state: Any, begin: Int[Array, " B"], ready: Bool[Array, " B"], *, sinks: int, interval: int
) -> tuple[LayerCache, Any]:
    """The first `interval` rows behind the sinks enter the store from slot `begin` on, in sequences that are ready."""
    is_ready = ready[:, None, None, None]
    # Other sequences write what they read: they may have too few slots left to write beyond their rows.
    start = jnp.minimum(begin, group.capacity - interval)
    slots = jnp.where(ready[:, None], -1, start[:, None] + ordinals(interval, 2))
    slots = jnp.broadcast_to(slots[:, None], (*group.length.shape, interval))

    def move(store: Array, resident: Array) -> tuple[Array, Array]:
        leaving, rest = resident[:, :, sinks : sinks + interval], resident[:, :, sinks:]
        block = to_host(jnp.where(is_ready, leaving, over_heads(gather_rows, store, slots)))
        for row in range(store.shape[0]):
            store = jax.lax.dynamic_update_slice(store, block[row : row + 1], (row, 0, start[row], 0))
        behind = jnp.where(is_ready, jnp.roll(rest, -interval, axis=2), rest)
        return store, jnp.concatenate([resident[:, :, :sinks], behind], axis=2)

    keys, resident_keys = move(group.keys, state["resident_keys"])
    values, resident_values = move(group.values, state["resident_values"])
    stored = begin + jnp.where(ready, interval, 0)
    degree = (ordinals(group.capacity, 3) < stored[:, None, None]).astype(jnp.float32)
    degree = to_host(jnp.broadcast_to(degree, group.degree.shape))
    resident = {"resident_keys": resident_keys, "resident_values": resident_values}
    return replace(group, keys=keys, values=values, degree=degree), state | resident


def find(rows: Int[Array, "B K n"], among: Int[Array, "B K m"], slots: int) -> Int[Array, "B K n"]:
    """Where a number stands in `among`, -1 where it does not; all are below `slots`, and negative ones are none."""

    def one_head(rows: Array, among: Array) -> Array:
        place = jnp.full(slots, -1, jnp.int32)
        place = place.at[jnp.where(among < 0, slots, among)].set(jnp.arange(among.size, dtype=jnp.int32), mode="drop")
        return jnp.where(rows < 0, -1, place[jnp.maximum(rows, 0)])

    return jax.vmap(jax.vmap(one_head))(rows, among)


def host_bytes(cache: KVCache) -> int:
    """Bytes of the cache that are in the host store."""
    stores = (
        (group.keys, group.values, group.degree)
        for layer, state in zip(cache.layers, cache.state, strict=True)
        for group, memory in zip(groups(layer), state, strict=True)
        if on_host(memory)
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tuple(stores)))


def traffic(cache: KVCache) -> dict[str, Any]:
    """Since the prompt: bytes moved from the host store, and the shares of what was recalled that were not moved."""
    nbytes, counts = 0, np.zeros(len(COUNTS), np.int64)
    for memory in (memory for state in cache.state for memory in state if on_host(memory)):
        here = np.asarray(memory["counts"]).sum((0, 1), dtype=np.int64)
        cached = memory["cached_keys"]
        nbytes += int(here[2] - here[3]) * 2 * cached.shape[-1] * cached.dtype.itemsize
        counts += here

    def share(part, of):
        return float(part / of) if of else 0.0

    return {
        "moved_bytes": nbytes,
        "cluster_hit_rate": share(counts[1], counts[0]),
        "row_hit_rate": share(counts[3], counts[2]),
    }


def _resident(group: LayerCache, state: Any, sinks: int) -> LayerCache:
    """What is on the device for good, as a cache of its own."""
    keys = state["resident_keys"]
    slot = ordinals(keys.shape[2], 2)
    token = jnp.where(slot < sinks, slot, slot - sinks + state["indexed"][:, None])
    real = token[:, None] < group.length[..., None]
    length = jnp.max(jnp.where(real, slot + 1, 0), axis=-1)
    return LayerCache(keys, state["resident_values"], real.astype(jnp.float32), length)


def _recall(soft_cap: float | None, q: Array, keys: Array, values: Array, device: dict[str, Array], rows: Array):
    """Attention of every query to its rows, what the device holds afterwards, and how much of it was there before."""
    batch, heads, each, count = rows.shape
    slots, queries = keys.shape[2], q.shape[2]
    targets = rows.reshape(batch, heads, each * count)
    place = find(targets, device["cached_rows"], slots)
    idle = jnp.all(targets < 0, axis=(1, 2), keepdims=True)

    # A sequence with nothing to recall takes the newest cached rows as they are; its degrees are zero.
    newest = device["cached_rows"][..., : targets.shape[2]]
    source = jnp.where(idle, jnp.arange(targets.shape[2], dtype=jnp.int32), place)
    numbers = jnp.where(idle, newest, targets) if newest.size else targets
    near = (device[name] for name in ("cached_keys", "cached_values"))
    fetched = [gather_rows(x, targets, cached, source) for x, cached in zip((keys, values), near, strict=True)]
    key_rows, value_rows = (x.reshape(batch, heads * each, count, -1) for x in fetched)
    degree = (rows >= 0).astype(jnp.float32).reshape(batch, heads * each, count)
    heads_in_order = q.reshape(batch, 1, heads * queries, -1)
    out, lse = biased_attention(heads_in_order, key_rows, value_rows, degree, soft_cap=soft_cap, return_lse=True)

    def remember(new: Array, old: Array) -> Array:
        """What is new before what was, whose oldest leaves; where nothing is new, nothing moves."""
        size, more = old.shape[2], max(0, old.shape[2] - new.shape[2])
        stays = idle.reshape(batch, *[1] * (old.ndim - 1))
        behind = jnp.where(stays, old[:, :, size - more :], old[:, :, :more])
        return jnp.concatenate([new[:, :, :size], behind], axis=2)

    recalled = zip(("cached_keys", "cached_values", "cached_rows"), (*fetched, numbers), strict=True)
    fresh = {name: remember(new, device[name]) for name, new in recalled}
    counts = _count(rows, (place >= 0).reshape(rows.shape), device, slots)
    return out.reshape(q.shape), lse.reshape(q.shape[:3]), fresh, counts


def _count(rows: Array, hit: Array, device: dict[str, Array], slots: int) -> Int[Array, "B K 4"]:
    """`COUNTS` of one step.

    A cluster is cut at its tail, so that its first row is always recalled, and all of it was there if its last one was.
    """
    first = jnp.where(device["sizes"] > 0, jnp.take_along_axis(device["order"], device["starts"], axis=-1), -1)
    begins = find(rows.reshape(*rows.shape[:2], -1), first, slots).reshape(rows.shape) >= 0
    real = rows >= 0
    behind = [(0, 0)] * 3 + [(0, 1)]
    ends = real & jnp.pad((begins | ~real)[..., 1:], behind, constant_values=True)
    masks = (begins, ends & hit, real, hit)
    return jnp.stack([jnp.sum(x, axis=(2, 3), dtype=jnp.int32) for x in masks], axis=-1)
