"""How new tokens enter a group of heads and attend to it: the steps that methods choose from."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.cache.attention import attend_cache, attend_new, combine, with_sinks
from clusterkv_jax.cache.kinds import AnyGroup, append, append_scored
from clusterkv_jax.cache.layers import LayerCache, State, StepInputs


def append_and_attend(
    group: AnyGroup, state: Any, tokens: StepInputs, *, apart: bool = True
) -> tuple[Float[Array, "B T H D"], AnyGroup, Any]:
    """The step of most methods: the tokens stand behind the rows there are, and attend to all of them.

    So do their scores, where the state has those of the rows.
    """
    longer, state = append_with_scores(group, state, tokens, apart=apart)
    how = tokens.soft_cap, tokens.degree_power
    if tokens.q.shape[1] == 1:
        return with_sinks(attend_cache(longer, tokens.q, *how), tokens.sink_logits), longer, state
    among = attend_new(tokens.q, tokens.k, tokens.v, tokens.real, tokens.soft_cap)
    attended = combine(attend_cache(group, tokens.q, *how), among, tokens.sink_logits)
    return attended, longer, state


def append_tokens(group: AnyGroup, tokens: StepInputs, *, apart: bool = False) -> AnyGroup:
    """The new tokens behind the rows there are; `apart` for methods whose steps do nothing else with a cache."""
    return append(group, *_new_rows(tokens), apart=apart)


def append_with_scores(group: Any, state: Any, tokens: StepInputs, *, apart: bool) -> tuple[Any, Any]:
    """`append_tokens`, and their scores where the state has those of the rows."""
    if state is None or "scores" not in state:
        return append_tokens(group, tokens, apart=apart), state
    assert tokens.scores is not None
    new = *_new_rows(tokens), jnp.swapaxes(tokens.scores, 1, 2)
    longer, scores = append_scored(group, state["scores"], *new, apart=apart)
    return longer, state | {"scores": scores}


def _new_rows(tokens: StepInputs) -> tuple[Array, Array, Array, Array]:
    return jnp.swapaxes(tokens.k, 1, 2), jnp.swapaxes(tokens.v, 1, 2), tokens.positions, tokens.real


def one_by_one(
    step: Callable[[LayerCache, State, StepInputs], tuple[Array, LayerCache, State]],
    group: LayerCache,
    state: State,
    tokens: StepInputs,
) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
    """T tokens through a step that takes one: for methods that drop rows at every token."""
    if tokens.q.shape[1] == 1:
        return step(group, state, tokens)

    def body(carry, token):
        group, state = carry
        attended, group, state = step(group, state, replace(token, sink_logits=tokens.sink_logits))
        return (group, state), attended[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], replace(tokens, sink_logits=None))
    (group, state), attended = jax.lax.scan(body, (group, state), by_token)
    return jnp.moveaxis(attended, 0, 1), group, state
