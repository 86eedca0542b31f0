"""Methods that keep the first rows and the latest ones, a row out for every row in."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.cache.slots import get_slot, set_slot
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.runtime.errors import check_fields, is_count


@dataclass(frozen=True)
class Streaming(Method):
    """Sinks and a ring of the latest rows: a new token takes the slot of the oldest row that is no sink."""

    budget: Budget
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks)

    def stay(self, prompt: LayerCache, budget: Int[Array, " B"]) -> Bool[Array, "B K C"]:
        """Sinks and latest rows of the prompts that exceed their budget, all of the others."""
        slot, length = ordinals(prompt.capacity, 3), prompt.length[..., None]
        latest = slot >= length - (budget - self.sinks)[:, None, None]
        return (prompt.degree > 0) & ((slot < self.sinks) | latest | (length <= budget[:, None, None]))

    def oldest(self, group: Any) -> Int[Array, "B K"]:
        """The slot of the oldest row that is no sink."""
        assert group.positions is not None
        candidate = (group.degree > 0) & (ordinals(group.capacity, 3) >= self.sinks)
        never = jnp.iinfo(jnp.int32).max
        return jnp.argmin(jnp.where(candidate, group.positions, never), axis=-1).astype(jnp.int32)


def replace_row(group: LayerCache, slot: Int[Array, "B K"], drop: Bool[Array, " B"]) -> LayerCache:
    """Drop a row per head by moving the last one into its slot, in sequences where `drop` holds."""
    last = group.length - 1
    group = set_slot(group, slot, get_slot(group, last), drop)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x[:, :, :1]), (group.keys, group.values, group.degree))
    nothing = LayerCache(*empty, length=last, positions=jnp.zeros_like(last)[..., None])
    group = set_slot(group, last, nothing, drop)
    return replace(group, length=jnp.where(drop[:, None], last, group.length))
