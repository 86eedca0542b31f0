"""TOVA: keep what the last token attends to (Oren et al., "Transformers are Multi-State RNNs")."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.methods.base import Input, Rows
from clusterkv_jax.methods.families.eviction import Windowed, window_of
from clusterkv_jax.scores import as_ranked, window_scores


@dataclass(frozen=True)
class TOVA(Windowed):
    """Keep the last row and the B - 1 rows before it that the last query attends to most, the same in all heads.

    The scores are the attention probabilities of the last query, averaged over the query heads of the layer.
    While decoding the newest query chooses.

    Attributes:
        budget: rows per KV head, the last one included.
        decode_interval: rows beyond B that trigger a new choice; None appends for ever.
    """

    decode_interval: int | None = None

    window = 1

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"heads", "queries"})

    @override
    def score(self, rows: Rows) -> Float[Array, "B 1 C"]:
        cache: Any = rows.cache
        return as_ranked(jnp.mean(window_scores(*window_of(rows, self.window), cache), axis=(1, 2))[:, None])
