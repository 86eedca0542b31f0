"""A baseline of budgets that hold while a model writes: the prompt stays, and of what it wrote random rows.

clusterkv evaluate --suite state --methods streamingllm,scripts/studies/random_rows.py:RandomRows --budgets 512
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.methods import Eviction, Protected, Schedule, recompress_every
from clusterkv_jax.methods.base import Rows, State


@dataclass(frozen=True)
class RandomRows(Eviction):
    """Keep the prompt, the last 32 rows, and random ones of those between; of a prompt beyond the budget its beginning.

    A position draws one number for all heads and layers, so that a row that went would never have come back.
    """

    @property
    @override
    def protected(self) -> Protected:
        return Protected(recent=32)

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(128)

    @override
    def init_state(self, rows: Rows) -> State:
        """How long the prompt was."""
        return {"prompt": rows.position}

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        """Below 1 for what was written, 1 for the prompt; of equal scores the first row stays."""
        cache: Any = rows.cache
        draw = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(jax.random.key(0), position)))
        drawn = draw(cache.positions.ravel()).reshape(cache.positions.shape)
        prompt = rows.state.get("prompt", rows.position)
        return jnp.where(cache.positions < prompt[:, None, None], 1.0, drawn)
