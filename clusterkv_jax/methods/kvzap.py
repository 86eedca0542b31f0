"""KVzap: keep the rows that a repetition of the context would look at, as a surrogate predicts (Jegou and Jeblick,
"KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2601.07891).
"""

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from clusterkv_jax.methods.base import Input
from clusterkv_jax.methods.families.scored import Scored


@dataclass(frozen=True)
class KVzap(Scored):
    """Keep the first `sinks` rows, the last `recent`, and those between them of the highest predicted scores.

    The model needs a surrogate, which `clusterkv calibrate` fits; heads get the shares that were measured with it.
    `scope` and `decode_interval` are as in `KeyDiff`; with scope "layer" tokens are appended while decoding.
    """

    sinks: int = 4
    recent: int = 8
    scope: Literal["head", "layer"] = "head"
    decode_interval: int | None = None

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"scores"})
