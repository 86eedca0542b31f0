"""Two methods in turn: one compresses the prompt, another keeps the cache small while decoding."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.attention import query_heads
from clusterkv_jax.cache import KVCache, Layer, LayerCache, NewTokens, State, groups
from clusterkv_jax.errors import check_fields
from clusterkv_jax.methods.adakv import AdaKV
from clusterkv_jax.methods.base import Budgeted, LayerPlan, Method, Request, aligned, append_and_attend, with_groups
from clusterkv_jax.methods.families.recall import Recall
from clusterkv_jax.methods.full import Full
from clusterkv_jax.methods.streamingllm import StreamingLLM, moved_back


@dataclass(frozen=True)
class Composed(Method):
    """`prefill` compresses the prompt, `decode` takes the cache over; each has its own budget.

    `Full()` as prefill leaves the prompt whole until `decode` compresses it; `Full()` as decode appends for ever. Both
    must treat a layer's heads alike, and decode may not have a smaller budget than prefill.
    """

    prefill: Method
    decode: Full | Budgeted

    def __post_init__(self) -> None:
        known = isinstance(self.decode, Full | Budgeted)
        again = isinstance(self.decode, Full) or (known and self.decode.decode_rows is not None)
        moved = getattr(self.decode, "rerotate", False) or (
            getattr(self.prefill, "rerotate", False) and not isinstance(self.decode, Full)
        )
        check_fields(
            self,
            ("prefill", isinstance(self.prefill, Full | Budgeted), "a method"),
            ("decode", known, "a method"),
            (
                "decode",
                isinstance(self.decode, Full) or not isinstance(self.prefill, AdaKV),
                "Full() after AdaKV: other methods know no heads of unequal lengths",
            ),
            # An index is made of a whole prompt, and needs it whole.
            ("prefill", not isinstance(self.prefill, Recall), "a method that drops or merges what it does not keep"),
            ("decode", not isinstance(self.decode, Recall), "a method that drops or merges what it does not keep"),
            ("decode", again, "Full() or one that compresses while decoding"),
            ("decode", not moved, "Full() where keys are rerotated: no other method knows how they were moved"),
        )

    @property
    def fewest_rows(self) -> int:
        """What both can do with."""
        return max(self.prefill.fewest_rows, self.decode.fewest_rows)

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """B of each prompt after prefill and while decoding, [lengths, 2]."""
        both = (method.rows(lengths, request, layer, head) for method in (self.prefill, self.decode))
        return np.stack(list(both), axis=-1)

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """Both budgets must be possible, and the decoding one not the smaller."""
        lengths = np.asarray(tuple(lengths))
        self.prefill.check(lengths, replace(request, reserve=0))
        if isinstance(self.decode, Full):
            return
        self.decode.check(lengths, request)
        for layer in range(request.num_layers):
            for n, (first, then) in zip(lengths, self.rows(lengths, request, layer), strict=True):
                if first < n and then < first:
                    raise ValueError(
                        f"Composed: of a prompt of {n} tokens prefill keeps {first} rows, "
                        f"so decode's budget must be at least that, got {then}."
                    )

    def head_groups(self, layer: int, request: Request) -> tuple[tuple[int, ...], ...]:
        """Those of both methods."""
        first = self.prefill.head_groups(layer, request)
        then = first if isinstance(self.decode, Full) else self.decode.head_groups(layer, request)
        if first != then:
            raise ValueError(f"Composed methods must group the heads of layer {layer} alike, got {first} and {then}.")
        return first

    def makes_scores(self, layer: int) -> bool:
        """As the prefill method has it."""
        return self.prefill.makes_scores(layer)

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """The prefill method's plan, with the slots that decoding takes."""
        plan = self.prefill.plan(layer, request)
        lengths = np.asarray(request.lengths)
        slots = []
        for heads in self.head_groups(layer, request):
            first, then = np.maximum(self.rows(lengths, request, layer, heads[0]), self.fewest_rows).T
            kept = np.minimum(lengths, self.prefill.slots(lengths, first, replace(request, reserve=0)))
            most = kept + request.reserve
            if isinstance(self.decode, Budgeted):
                most = np.minimum(self.decode.slots_after(kept, then, request), lengths + request.reserve)
            slots.append(aligned(int(np.max(most))))
        return replace(plan, capacities=tuple(slots))

    def rounds(self, layer: int, request: Request) -> int | None:
        """As the prefill method has it."""
        return self.prefill.rounds(layer, request)

    def compress(
        self,
        queries: Float[Array, "B H N D"] | None,
        keys: Float[Array, "B K N D"],
        values: Float[Array, "B K N D"],
        lengths: Int[Array, " B"],
        rows: Int[Array, "B groups 2"],
        plan: LayerPlan,
        key: Array | None,
        handed: Any = None,
    ) -> tuple[Layer, tuple[State, ...], Any]:
        """The prefill method's cache, with the decoding method's state."""
        layer, before, handed = self.prefill.compress(queries, keys, values, lengths, rows[..., 0], plan, key, handed)
        made, state = [], []
        for i, (group, heads, kept) in enumerate(zip(groups(layer), plan.heads, before, strict=True)):
            if isinstance(self.decode, Full):
                made.append(group)
                state.append(kept if self._moves_keys and kept is not None else None)
            else:
                asked = None if queries is None else query_heads(queries, heads, keys.shape[1], axis=1)
                made.append(self.decode.hold(group, plan.capacities[i]))
                state.append(self.decode.start(group, rows[:, i, 1], asked, plan, key))
        return with_groups(layer, made), tuple(state), handed

    @property
    def _moves_keys(self) -> bool:
        return isinstance(self.prefill, StreamingLLM) and self.prefill.rerotate

    def step_group(
        self, group: LayerCache, state: State, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """As the decoding method does; where keys were moved, new ones stand as far back."""
        if self._moves_keys:
            return append_and_attend(group, state, moved_back(new, state))
        return self.decode.step_group(group, state, new)

    def due(self, cache: KVCache) -> Bool[Array, ""] | None:
        """As the decoding method does."""
        return self.decode.due(cache)

    def recompress(self, cache: KVCache) -> KVCache:
        """As the decoding method does."""
        return self.decode.recompress(cache)
