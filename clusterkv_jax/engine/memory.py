"""What an engine takes of the device's memory, before it takes it."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.blocks.linear import tokens_at_once
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.sharding import HEAD_AXES, ambient_mesh, partition


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device, by what takes them.

    Attributes:
        weights: the model's parameters.
        slots: the caches and logits of all slots.
        prompt: the cache of the prompt that is being read, and an estimate of what a layer takes meanwhile.
        contexts: those that stay on the device.
    """

    weights: int
    slots: int
    prompt: int
    contexts: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.weights + self.slots + self.prompt + self.contexts


def memory_plan(params: Any, config: ModelConfig, one: Any, slots: int, width: int, contexts: int) -> MemoryPlan:
    """The plan of an engine; `one` are the arrays of one slot, or their shapes, `width` the longest prompt's."""
    each = tree_bytes(one)
    itemsize = number_dtype(params).itemsize
    # Hidden states before and after, queries and what they attend to, keys and values, and an MLP's columns.
    columns = 2 * config.hidden_size + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp = 3 * config.intermediate_size * min(width, tokens_at_once())
    layer = (columns * width + mlp) * itemsize
    return MemoryPlan(tree_bytes(params), slots * each, each + layer, contexts)


def tree_bytes(tree: Any) -> int:
    """Bytes on one device of all arrays, or of shapes of caches on the ambient mesh, whose heads devices share."""
    return sum(math.prod(_part(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _part(x: Any) -> tuple[int, ...]:
    mesh = ambient_mesh()
    if isinstance(x, jax.Array):
        return x.sharding.shard_shape(x.shape)
    if mesh is None:
        return x.shape
    return NamedSharding(mesh, partition(HEAD_AXES[x.ndim], x.shape, mesh)).shard_shape(x.shape)


def device_limit() -> int | None:
    """Bytes of the device, where it tells."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")


def check_memory(plan: MemoryPlan, limit: int | None, slots: int) -> None:
    """Raise ValueError if the plan does not fit."""
    if limit is not None and plan.total > limit:

        def size(count):
            return f"{count / 2**30:.3g} GiB"

        raise ValueError(
            f"An engine of {slots} slots needs {size(plan.total)} of {size(limit)}: {size(plan.weights)} of weights, "
            f"{size(plan.slots)} of slots, {size(plan.prompt)} to read a prompt and {size(plan.contexts)} of "
            "contexts; take fewer slots, a smaller max_tokens, reserve or budget."
        )
