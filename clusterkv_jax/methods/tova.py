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
    `decode_interval` compresses again whenever that many rows more than B are held, by the last query then; None
    appends.
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
