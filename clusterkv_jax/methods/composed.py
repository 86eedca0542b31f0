"""Two methods in turn: one compresses the prompt, another keeps the cache small while decoding."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Array, Float
from typing_extensions import override

from clusterkv_jax.cache import pages
from clusterkv_jax.cache.layers import StepInputs, resize
from clusterkv_jax.learned.repetition import Frame, Instruction, Repetition
from clusterkv_jax.methods.base import Compressed, Input, Method, Rows, State, StorageKind, compacted
from clusterkv_jax.methods.full import Full
from clusterkv_jax.methods.request import RequestShape, all_heads
from clusterkv_jax.methods.schedule import Protected, Schedule
from clusterkv_jax.methods.steps import append_and_attend
from clusterkv_jax.methods.streamingllm import moved_back
from clusterkv_jax.runtime.errors import check_fields, counted


@dataclass(frozen=True)
class Composed(Method):
    """`prefill` compresses the prompt, `decode` takes the cache over; each has its own budget.

    `Full()` as prefill leaves the prompt whole until `decode` compresses it; `Full()` as decode appends for ever. No
    head may have a smaller budget for decoding than for the prompt.

    Attributes:
        prefill: the method for the prompt, with a budget of its own.
        decode: the method for generated tokens: `Full()` or one that compresses while tokens are generated.
    """

    prefill: Method
    decode: Method

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            check_fields(self, (name, _is_simple(getattr(self, name)), "a method"))
        first, then = self.prefill.storage, self.decode.storage
        appends = self.decode == Full()
        returns = appends or self.decode.schedule.kind != "append"
        both = first == then == "centroids"
        alike = not both or self.prefill.degree_power == self.decode.degree_power
        stays = then != "moved" and (appends or first != "moved")
        dropping = "a method that drops or merges what it does not keep"
        unequal = "Full() after AdaKV: other methods know no heads of unequal lengths"
        unscored = "one that needs no scores of rows: those of the prompt do not follow what prefill keeps"
        once = "a method without a cache_dtype of its own: that of the pair holds for both"
        rerotated = "Full() where keys are rerotated: no other method knows how they were moved"
        check_fields(
            self,
            ("decode", appends or first != "pages", unequal),
            # An index is made of a whole prompt, and needs it whole.
            ("prefill", self.prefill.forgets, dropping),
            ("decode", self.decode.forgets, dropping),
            ("decode", returns, "Full() or one that compresses while decoding"),
            ("decode", stays, rerotated),
            ("decode", "scores" not in self.decode.inputs(0), unscored),
            ("decode", alike, "one with the degree_power of prefill: the centroids of both stand together"),
            ("prefill", self.prefill.cache_dtype is None, once),
            ("decode", self.decode.cache_dtype is None, once),
        )

    @property
    @override
    def storage(self) -> StorageKind:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is there while decoding."""
        return self.prefill.storage if self.decode == Full() else self.decode.storage

    @property
    @override
    def protected(self) -> Protected:
        """A budget must leave what both can do with."""
        fewest = max(self.prefill.protected.fewest, self.decode.protected.fewest)
        return Protected(min_free=fewest)

    @property
    @override
    def schedule(self) -> Schedule:
        """While decoding that of `decode`; the prompt's slack is that of `prefill`."""
        first, then = self.prefill.schedule, self.decode.schedule
        return replace(then, slack=first.slack, rounding=max(first.rounding, then.rounding))

    @property
    @override
    def degree_power(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the method which makes centroids."""
        return (self.prefill if self.prefill.storage == "centroids" else self.decode).degree_power

    @property
    def repetition(self) -> Repetition:
        """The prompt is what `prefill` compresses."""
        prefill: Any = self.prefill  # one that needs "repetition"
        return prefill.repetition

    def with_words(self, words: Instruction, frame: Frame | None = None) -> "Composed":
        """As the prefill method."""
        prefill: Any = self.prefill
        return replace(self, prefill=prefill.with_words(words, frame))

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B of each prompt and KV head after the prompt and while decoding, i64 [lengths, K, 2]."""
        both = [method.budget_rows(lengths, layer, request) for method in (self.prefill, self.decode)]
        if all(rows.strides[1] == 0 for rows in both):
            return all_heads(np.stack([rows[:, 0] for rows in both], axis=-1), request.num_kv_heads)
        return np.stack(both, axis=-1)

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """Both budgets must be possible, and no head's may be smaller while decoding."""
        self.prefill.check(lengths, replace(request, reserve=0))
        self.decode.check(lengths, request)
        for layer in range(request.num_layers):
            first, then = np.moveaxis(self.budget_rows(lengths, layer, request), -1, 0)
            smaller = (first < lengths[:, None]) & (then < first)
            if smaller.any():
                at, head = np.argwhere(smaller)[0]
                raise ValueError(
                    f"Composed: of a prompt of {counted(lengths[at], 'token')} prefill keeps "
                    f"{counted(first[at, head], 'row')}, so decode's budget must be at least that, "
                    f"got {then[at, head]}."
                )

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return self.prefill.inputs(layer) | (self.decode.inputs(layer) - {"selection", "layers"})

    @override
    def compress(self, rows: Rows) -> Compressed:
        """The prefill method's cache, with the decoding method's state."""
        before = replace(rows, state=self.prefill.init_state(rows))
        result = self.prefill.compress(before)
        if self.decode == Full():
            rotated = self.prefill.storage == "moved"
            return replace(result, state=({"budget": rows.budget} | (result.state or {})) if rotated else {})
        cache: Any = compacted(result).cache
        cache = resize(cache, rows.plan.capacity)
        state = self.decode.init_state(replace(rows, cache=cache))
        if self.decode.storage == "pages":
            cache = pages.to_pages(cache, cache.degree > 0, rows.plan.capacity)
        return Compressed(cache, state, result.selection)

    @override
    def recompress(self, rows: Rows) -> Compressed:
        """As the decoding method does."""
        return self.decode.recompress(rows)

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """As the decoding method does; where keys were moved, new ones stand as far back."""
        if self.prefill.storage == "moved":
            return append_and_attend(group, state, moved_back(tokens, state))
        return self.decode.step(group, state, tokens)


def _is_simple(method: Any) -> bool:
    """Whether it is a method, and no pair of methods."""
    return hasattr(method, "budget_rows") and not hasattr(method, "prefill")
