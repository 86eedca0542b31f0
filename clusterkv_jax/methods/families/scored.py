"""Methods whose rows come with a score of their own, which moves with them while decoding."""

from abc import abstractmethod
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.cache.layers import mask_to_slots
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.methods.base import Compressed, Input, Rows, State
from clusterkv_jax.methods.families.eviction import Scoped
from clusterkv_jax.methods.schedule import Protected
from clusterkv_jax.runtime.errors import check_fields, is_count


class Scored(Scoped):
    """Keeps the first `sinks` rows, the last `recent`, and those between them of the highest scores.

    The dataclasses below it have these fields. With a `decode_interval` new tokens come with scores too.
    """

    sinks: int
    recent: int

    def __post_init__(self) -> None:
        super().__post_init__()
        moves = "None where heads share pages: rows there do not take their scores along"
        check_fields(
            self,
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
            ("recent", is_count(self.recent), "a whole number of at least 0"),
            ("decode_interval", self.decode_interval is None or self.scope == "head", moves),
        )

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks, recent=self.recent)

    @abstractmethod
    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        """Where the scores come from: "scores" of a surrogate, or a "repetition" of the prompt."""

    @override
    def score(self, rows: Rows) -> Float[Array, "B K C"]:
        return scores_of(rows)

    @override
    def init_state(self, rows: Rows) -> State:
        """The scores, where there is compression while decoding."""
        return {} if self.decode_interval is None else {"scores": scores_of(rows)}

    @override
    def compress(self, rows: Rows) -> Compressed:
        """As every eviction does; scores go where their rows go."""
        result = super().compress(rows)
        if not rows.state:
            return result
        return replace(result, state=rows.state | {"scores": take_scores(rows.state["scores"], result.selection)})

    @override
    def recompress(self, rows: Rows) -> Compressed:
        """The same in place."""
        result = super().recompress(rows)
        slots = mask_to_slots(result.selection, rows.plan.capacity) if result.slots is None else result.slots
        return replace(result, state=rows.state | {"scores": take_scores(rows.state["scores"], slots)})


def scores_of(rows: Rows) -> Float[Array, "B K C"]:
    """What each row is worth, after the prompt as while decoding."""
    if "scores" in rows.state:
        return rows.state["scores"]
    assert rows.scores is not None
    return rows.scores


def recent_of_mean(
    part: float, budget: Int[Array, " B"], share: Float[Array, " B"], most: Int[Array, " B"]
) -> Int[Array, " B"]:
    """So much of the mean budget of all heads as `part` says, at most `most`; a head has `share` times the mean."""
    of_mean = part * budget.astype(jnp.float32) / share
    return jnp.round(jnp.minimum(of_mean, most.astype(jnp.float32))).astype(jnp.int32)


def scores_with_recent(
    scores: Float[Array, "B #K C"], length: Int[Array, "B K"], recent: Int[Array, " B"]
) -> Float[Array, "B K C"]:
    """The scores, with infinity for the last `recent` rows."""
    slot = ordinals(scores.shape[2], 3)
    return jnp.where(slot >= length[..., None] - recent[:, None, None], jnp.inf, scores)


def take_scores(scores: Float[Array, "B K C"], slots: Int[Array, "B K slots"]) -> Float[Array, "B K slots"]:
    """The scores of these slots, 0 where a slot is -1: what `cache.take_slots` does with rows."""
    return jnp.where(slots >= 0, jnp.take_along_axis(scores, jnp.maximum(slots, 0), axis=2), 0.0)
