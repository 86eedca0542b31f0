"""KVzip: keep the rows that the model looks at when it repeats its context (Kim et al., "KVzip: Query-Agnostic KV Cache
Compression with Context Reconstruction", 2505.23416), and KVzip+ (2601.07891).
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.learned.repetition import Frame, Instruction, Repetition
from clusterkv_jax.methods.base import Input
from clusterkv_jax.methods.families.eviction import best_of_layer
from clusterkv_jax.methods.families.scored import Scored
from clusterkv_jax.runtime.errors import check_fields, is_count


@dataclass(frozen=True)
class KVzip(Scored):
    """Keep the first `sinks` rows, the last `recent`, and those between them that a repetition of the prompt looks at.

    The model reads the prompt, then repeats it in pieces of `chunk` tokens behind its full cache; a row is worth the
    greatest attention that it gets (`learned.reconstruction`). With `plus` attention counts by what it writes. Heads
    get the shares of the model's calibration, where there is one; with `scope` "layer" those of a layer share pages.
    `instruction` asks for the repetition: `generate` takes KVzip's words, `prefill` needs `learned.instruction`. A
    prompt that begins as the model's chat template does is repeated within it; `frame` are the template's ids before
    and behind a message, which `generate` takes from the tokenizer. Tokens are appended while decoding.

    Attributes:
        budget: rows per KV head, sinks included; the mean of a layer with `scope="layer"`.
        sinks: first rows, which always stay, and which every softmax sees.
        recent: last rows of the prompt, which always stay.
        plus: whether attention counts by what it writes: KVzip+.
        scope: "head": rows compete in their head; "layer": over all heads of a layer.
        chunk: tokens of a piece.
        instruction: ids that ask for the first piece, ids for a later one, ids before the answer; `generate` takes
            KVzip's words.
        frame: ids that the chat template puts before a message and behind it; `generate` takes them where there is
            a template.
    """

    sinks: int = 4
    recent: int = 0
    plus: bool = False
    scope: Literal["head", "layer"] = "head"
    chunk: int = 2048
    instruction: Instruction | None = field(default=None, repr=False)
    frame: Frame | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("plus", isinstance(self.plus, bool), "True or False"),
            ("chunk", is_count(self.chunk, 1), "a whole number of at least 1"),
            ("instruction", self.instruction is None or _are_ids(self.instruction, 3), "None or 3 tuples of ids"),
            ("frame", self.frame is None or _are_ids(self.frame, 2), "None or 2 tuples of ids"),
        )

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"repetition"})

    @override
    def choose(
        self, scores: Float[Array, "B #K C"], length: Int[Array, "B K"], budget: Int[Array, " B"], capacity: int
    ) -> Bool[Array, "B #K C"]:
        """As every eviction does, but heads that share a layer's rows have none that are safe."""
        if self.storage == "pages":
            return best_of_layer(scores, length, budget, self.protected, capacity, safeguard=0.0)
        return super().choose(scores, length, budget, capacity)

    @property
    def repetition(self) -> Repetition:
        """How a prompt is repeated."""
        return Repetition(self.instruction, self.frame, self.chunk, self.sinks, self.plus)

    def with_words(self, words: Instruction, frame: Frame | None = None) -> "KVzip":
        """The method with what asks a model to repeat a prompt, and its chat template, unless it has words already."""
        return self if self.instruction is not None else replace(self, instruction=words, frame=frame)


def _are_ids(words: Any, parts: int) -> bool:
    return (
        isinstance(words, tuple)
        and len(words) == parts
        and all(isinstance(part, tuple) and all(map(is_count, part)) for part in words)
    )
