"""Causal attention over a prompt whose tokens lie on several devices, along the mesh axis "sequence".

Every device gets all keys and values of its heads (one layer's: clustering needs whole heads anyway). Later queries see
more keys, so for S devices the queries come in 2 S halves, and device i attends for the halves i and 2 S - 1 - i, which
are equal work together. Two exchanges bring the queries there and two the outputs back.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from clusterkv_jax.blocks.causal_attention import causal_attention, last_queries_attention
from clusterkv_jax.runtime.sharding import SEQUENCE, ambient_mesh, partition, token_ways


def attention_over_tokens(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " H"] | None = None,
) -> Float[Array, "B N H D"]:
    """`causal_attention`, whether the ambient mesh splits tokens or not.

    Raises ValueError if N is not a multiple of twice the devices along "sequence".
    """
    parts = token_ways(q.shape[1])
    if parts == 1:
        return causal_attention(q, k, v, window=window, soft_cap=soft_cap, sink_logits=sink_logits)
    mesh = ambient_mesh()
    queries, keys = _specs(q, k)
    options = {"window": window, "soft_cap": soft_cap}
    heads = PartitionSpec(queries[2])

    def run(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        attend = partial(last_queries_attention, **options, sink_logits=sinks)
        return _local(attend, parts, q, k, v)

    over_mesh = jax.shard_map(run, mesh=mesh, in_specs=(queries, keys, keys, heads), out_specs=queries, check_vma=False)
    return over_mesh(q, k, v, sink_logits)


def _specs(q: Array, k: Array) -> tuple[PartitionSpec, PartitionSpec]:
    """Queries and keys on their devices: query heads where their KV head is, or several devices to a KV head."""
    mesh = ambient_mesh()
    keys = partition(("batch", "tokens", "kv_heads", None), k.shape, mesh)
    queries = partition(("batch", "tokens", "heads", None), q.shape, mesh)
    one_each = keys[2] is not None and k.shape[2] == mesh.shape[keys[2]]  # pyright: ignore[reportOptionalMemberAccess]
    if queries[2] != keys[2] and not one_each:
        queries = PartitionSpec(*queries[:2], keys[2], None)
    return queries, keys


def _local(
    attend: Callable[[Array, Array, Array], Array],
    parts: int,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
) -> Float[Array, "B T H D"]:
    """What one of the devices does with its tokens."""
    k, v = (jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True) for x in (k, v))
    half = q.shape[1] // 2
    mine = jax.lax.axis_index(SEQUENCE)
    is_odd = mine % 2 == 1

    # First halves of devices go to all devices once, second halves too: even numbers and odd ones.
    to = [[_device(2 * i + j, parts) for i in range(parts)] for j in (0, 1)]
    even = jax.lax.ppermute(q[:, :half], SEQUENCE, list(enumerate(to[0])))
    odd = jax.lax.ppermute(q[:, half:], SEQUENCE, list(enumerate(to[1])))
    low, high = jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)

    def halves(number: int) -> Callable[..., tuple[Array, Array]]:
        def run(low: Array, high: Array) -> tuple[Array, Array]:
            def upto(x, end):
                return attend(x, k[:, :end], v[:, :end])

            return upto(low, half * (number + 1)), upto(high, half * (2 * parts - number))

        return run

    low, high = jax.lax.switch(mine, [halves(number) for number in range(parts)], low, high)
    even, odd = jnp.where(is_odd, high, low), jnp.where(is_odd, low, high)
    back = [[(device, i) for i, device in enumerate(devices)] for devices in to]
    return jnp.concatenate(
        [jax.lax.ppermute(x, SEQUENCE, pairs) for x, pairs in zip((even, odd), back, strict=True)], axis=1
    )


def _device(half: int, parts: int) -> int:
    """The device that attends for this half."""
    return min(half, 2 * parts - 1 - half)
