"""Compactor: keep keys that stick out of the others and what their neighbourhood attends to (Chari and Van Durme,
"Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores").
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.learned import compactor, draw_sketch
from clusterkv_jax.learned.expected import before_rotation
from clusterkv_jax.methods.base import Input, Rows
from clusterkv_jax.methods.families.eviction import Scoped
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.runtime.errors import check_fields, is_count, is_number


@dataclass(frozen=True)
class Compactor(Scoped):
    """Keep the first `sinks` and last `recent` rows, and those of the best blend of leverage and attention.

    Leverage is that of keys before their rotation in a random sketch of `sketch` columns; attention that of the queries
    of the same `chunk` rows, unscaled and not causal. `blending` weighs the leverage; None takes the share of rows that
    is dropped. Both are standardised over the heads of equal budgets. What is decoded is appended,
    as the queries of the rows are gone.

    Attributes:
        budget: rows per KV head, sinks and recent rows included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay.
        recent: last rows, which always stay.
        chunk: rows that attend to one another.
        sketch: columns of the random matrix.
        blending: weight of the leverage; None is the share of rows that is dropped.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
    """

    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    sketch: int = 48
    blending: float | None = None
    scope: Literal["head", "layer"] = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        blends = self.blending is None or (is_number(self.blending) and self.blending >= 0)
        check_fields(
            self,
            ("sinks", is_count(self.sinks), "a whole number"),
            ("recent", is_count(self.recent), "a whole number"),
            ("chunk", is_count(self.chunk, 1), "a whole number of at least 1"),
            ("sketch", is_count(self.sketch, 1), "a whole number of at least 1"),
            ("blending", blends, "a number of at least 0 or None"),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks, recent=self.recent)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"heads", "queries"})

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        cache: Any = rows.cache
        assert rows.queries is not None
        assert rows.key is not None
        blending = self.blending
        if blending is None:
            blending = 1 - rows.budget.astype(jnp.float32) / rows.position.astype(jnp.float32)
        unrotated = before_rotation(cache.keys, cache.positions[:, 0], rows.plan.rope)
        sketch = draw_sketch(rows.key, cache.keys.shape[3], self.sketch)
        return compactor(
            *(rows.queries, cache.keys, unrotated, cache.values, sketch, blending),
            chunk=self.chunk,
            first=self.sinks,
            last=self.recent,
            lengths=cache.length,
        )
