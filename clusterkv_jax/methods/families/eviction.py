"""Methods that keep the rows of the highest scores and drop the others.

Eviction    what a row is worth is all that a method must say
Scoped      the same, and a setting says whether rows compete in their head or in their layer
Windowed    worth is the attention of the last `window` queries, which always stay
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from clusterkv_jax.budget import Budget, look_up
from clusterkv_jax.cache import pages
from clusterkv_jax.cache.kinds import rows_held
from clusterkv_jax.cache.layers import (
    LayerCache,
    StepInputs,
    dequantised_rows,
    mask_to_slots,
    take_rows,
    take_slots,
)
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.methods.base import Compressed, Input, Method, Rows, State, StorageKind
from clusterkv_jax.methods.schedule import Protected, Schedule, recompress_every
from clusterkv_jax.methods.steps import append_and_attend
from clusterkv_jax.runtime.control_flow import head_by_head
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.errors import check_fields, is_count, is_one_of
from clusterkv_jax.runtime.sharding import over_heads
from clusterkv_jax.scores import last_queries


@dataclass(frozen=True)
class Eviction(Method):
    """Keeps the protected rows and, of those between them, the ones with the highest scores.

    A method says what a row is worth with `score`. It works by heads, in batches, over a mesh, and while decoding too.
    With `storage = "pages"` the heads of a layer share its budget by their scores, as AdaKV's do.
    """

    budget: Budget
    # Which of two rows of equal scores stays.
    latest_wins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("schedule", self.schedule.kind in ("append", "interval"), "recompress_every(n) or Schedule()"),
        )

    @abstractmethod
    def score(self, rows: Rows) -> Float[Array, "B #K C"]:
        """What each row is worth, f32, more is more; one score for all heads where the second dimension is 1.

        What protected rows and empty slots get means nothing.
        """

    def choose(
        self, scores: Float[Array, "B #K C"], length: Int[Array, "B K"], budget: Int[Array, " B"], capacity: int
    ) -> Bool[Array, "B #K C"]:
        """Which rows stay, `budget` of them where there are more; of equal scores the first or the latest.

        Rows compete with the rows of their head; with those of the whole layer where `storage` is "pages".
        `capacity` is static: the most rows that a head can hold.
        """
        if self.storage == "pages":
            return best_of_layer(scores, length, budget, self.protected, capacity, latest_wins=self.latest_wins)
        free = unprotected(scores, length, self.protected)
        count = budget - self.protected.first - self.protected.last
        best = best_rows(jnp.where(free, scores, -jnp.inf), count, latest_wins=self.latest_wins)
        return best | protected_rows(free, length)

    @override
    def compress(self, rows: Rows) -> Compressed:
        """Take the rows that stay, or those that an earlier layer selected."""
        cache: Any = rows.cache
        if self.storage == "pages":
            return Compressed(pages.to_pages(cache, self._stay(rows), rows.plan.capacity))
        slots = rows.selection
        if slots is None:
            slots = mask_to_slots(self._stay(rows), rows.plan.capacity)
        return Compressed(take_slots(cache, slots), selection=slots)

    @override
    def recompress(self, rows: Rows) -> Compressed:
        """As after the prompt, over the rows there are, in place: of one head after the other, but where kernels move
        rows.
        """
        if self.storage == "pages":
            return Compressed(self._recompress_pages(rows))
        cache: Any = rows.cache
        stay = self._stay(rows) if rows.selection is None else rows.selection
        if traits().merges_in_place:
            slots = over_heads(partial(mask_to_slots, capacity=cache.capacity), stay)
            left = replace(cache, length=jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32))
            return Compressed(left, selection=stay, slots=slots)

        def take(tree: tuple[LayerCache, Array]) -> tuple[LayerCache, Array]:
            group, stay = tree
            return take_rows(group, stay, group.capacity)[0], stay

        group, _ = over_heads(lambda *tree: head_by_head(take, tree), cache, stay)
        return Compressed(group, selection=stay)

    def _stay(self, rows: Rows) -> Bool[Array, "B K C"]:
        """The rows that stay: all of them in sequences that hold no more than their budget."""
        cache: Any = rows.cache
        scores = self.score(replace(rows, cache=dequantised_rows(cache)))
        if scores.shape not in (shape := cache.degree.shape, (shape[0], 1, shape[2])):
            raise ValueError(f"{type(self).__name__}.score must return [B,K,C] = {shape}, got {scores.shape}.")
        keep = self.choose(scores, cache.length, rows.budget, cache.capacity)
        over = rows_held(cache) > rows.budget
        return jnp.where(over[:, None, None], keep, cache.degree > 0)

    def _recompress_pages(self, rows: Rows) -> Any:
        """Heads are taken out of the pages one by one to be scored, each with room for all rows of the layer."""
        group: Any = rows.cache
        heads, slots = group.length.shape[1], group.degree[0].size
        by_head = {name: jnp.stack(jnp.split(x, heads, axis=1)) for name, x in rows.state.items() if x.ndim == 4}

        def score(each: tuple[Array, dict[str, Array]]) -> Float[Array, "B C"]:
            head, state = each
            one_head = dequantised_rows(pages.from_pages(group, slots, head[None]))
            alone = replace(rows, cache=one_head, state=rows.state | state)
            return self.score(alone)[:, 0]

        scores = jnp.moveaxis(jax.lax.map(score, (jnp.arange(heads), by_head)), 0, 1)
        keep = self.choose(scores, group.length, rows.budget, slots // heads)
        every_row = ordinals(slots, 3) < group.length[..., None]
        over = rows_held(group) > rows.budget
        return pages.reassign(group, jnp.where(over[:, None, None], keep, every_row))


class Scoped(Eviction):
    """Rows compete with those of their head, or with those of all heads of the layer, as AdaKV's do.

    The dataclasses below it have the field `scope`, and `decode_interval` where they can score rows while decoding.
    """

    scope: Literal["head", "layer"]
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        by_head = isinstance(self.budget.shares, tuple) and isinstance(self.budget.shares[0], tuple)
        unshared = 'one without shares per head where scope is "layer": those are the prompt\'s own'
        check_fields(
            self,
            ("scope", is_one_of(self.scope, "head", "layer"), '"head" or "layer"'),
            ("budget", is_one_of(self.scope, "head") or not by_head, unshared),
            check_interval(self),
        )

    @property
    @override
    def storage(self) -> StorageKind:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens, in pages where heads of a layer hold unequally many."""
        return "pages" if self.scope == "layer" else "tokens"

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.decode_interval)


def check_interval(method: Any) -> tuple[str, bool, str]:
    """The rule of `decode_interval`, for `check_fields`."""
    interval = method.decode_interval
    return "decode_interval", interval is None or is_count(interval, 1), "a whole number of at least 1 or None"


class Windowed(Eviction):
    """Keeps the last `window` rows, and of those before them the ones that the last `window` queries attend to most.

    The dataclasses below it have these fields, and score rows by `window_of` them.
    """

    window: int
    decode_interval: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("window", is_count(self.window, 1), "a whole number of at least 1"),
            check_interval(self),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(window=self.window)

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.decode_interval)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"queries"})

    @override
    def init_state(self, rows: Rows) -> State:
        """The window's queries, where there is compression while decoding."""
        return {} if self.decode_interval is None else {"queries": window_of(rows, self.window)[0]}

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, attend, and remember the last `window` queries."""
        attended, group, _ = append_and_attend(group, state, tokens)
        count = jnp.sum(tokens.real, axis=1, dtype=jnp.int32)
        queries = jnp.concatenate([state["queries"], jnp.swapaxes(tokens.q, 1, 2)], axis=2)
        return attended, group, state | {"queries": last_queries(queries, self.window + count, self.window)}


def window_of(rows: Rows, window: int) -> tuple[Float[Array, "B H W D"], Int[Array, "B W"]]:
    """The last `window` queries and their positions, after the prompt as while decoding."""
    positions = rows.position[:, None] - window + ordinals(window, 2)
    if "queries" in rows.state:
        return rows.state["queries"], positions
    assert rows.queries is not None
    return last_queries(rows.queries, rows.position, window), positions


# --- by what rule rows compete ---


def unprotected(
    scores: Float[Array, "B #K C"], length: Int[Array, "B K"], protected: Protected
) -> Bool[Array, "B K C"]:
    """The rows that compete: behind the first protected ones and before the last."""
    slot = ordinals(scores.shape[2], 3)
    return (slot >= protected.first) & (slot < length[..., None] - protected.last)


def protected_rows(free: Bool[Array, "B K C"], length: Int[Array, "B K"]) -> Bool[Array, "B K C"]:
    """The rows that there are and that do not compete."""
    return ~free & (ordinals(free.shape[2], 3) < length[..., None])


def best_of_layer(
    scores: Float[Array, "B K C"],
    length: Int[Array, "B K"],
    budget: Int[Array, " B"],
    protected: Protected,
    capacity: int,
    safeguard: float = 0.2,
    latest_wins: bool = False,
) -> Bool[Array, "B K C"]:
    """The protected rows of every head and the best others of all K heads, K B in all (AdaKV, as kvpress counts).

    The int(safeguard B) best rows of each head are safe. `capacity` is the most rows that a head can hold: a budget
    beyond it is all there are.
    """
    free = unprotected(scores, length, protected)
    scores, always = jnp.where(free, scores, -jnp.inf), protected.first + protected.last
    safe = best_rows(scores, share_of(safeguard, budget, capacity) - always, latest_wins=latest_wins)
    best = best_rows_of_layer(jnp.where(safe, jnp.inf, scores), budget - always, latest_wins=latest_wins)
    return best | protected_rows(free, length)


def best_rows(
    score: Float[Array, "B K C"], count: Int[Array, " B"] | Int[Array, "B K"], *, latest_wins: bool = False
) -> Bool[Array, "B K C"]:
    """`top_rows`, each device its own heads; of equal scores the first rows, or the latest."""
    if latest_wins:
        return best_rows(score[..., ::-1], count)[..., ::-1]
    return over_heads(top_rows, score, count)


def best_rows_of_layer(
    scores: Float[Array, "B K C"], rows: Int[Array, " B"], *, latest_wins: bool = False
) -> Bool[Array, "B K C"]:
    """The K rows highest scores of all K heads together; of equal ones the first head's, there as in `best_rows`."""
    if latest_wins:
        return best_rows_of_layer(scores[..., ::-1], rows)[..., ::-1]
    batch, heads, slots = scores.shape
    return best_rows(scores.reshape(batch, 1, heads * slots), heads * rows).reshape(scores.shape)


def share_of(share: float, rows: Int[Array, " B"], most: int) -> Int[Array, " B"]:
    """int(share * rows) in exact arithmetic, of at most `most` rows."""
    table = np.floor(share * np.arange(most + 1, dtype=np.float64))
    return look_up(table.astype(np.int64), jnp.clip(rows, 0, most))
