"""The hidden state of a token between layers of experts whose outputs nobody has added up yet."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

COUNTERS = 128  # of a launch whose programs wait for each other; a thread writes each


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pending:
    """A token's hidden state in parts.

    Attributes:
        total: the state before the experts.
        outputs: of the experts that the token has chosen, by their shares, float32.
        counters: zeros, for the next launch to count its programs by, and for no other.
    """

    total: Float[Array, " M"]
    outputs: Float[Array, "N M"]
    counters: Int[Array, " counters"]


def pending(hidden: Float[Array, " M"], per_token: int) -> Pending:
    """A whole state, as a layer with so many experts of a token takes it."""
    outputs = jnp.zeros((per_token, len(hidden)), jnp.float32)
    return Pending(hidden, outputs, jnp.zeros(COUNTERS, jnp.int32))


def whole(hidden: Pending) -> Float[Array, " M"]:
    """The whole state."""
    return hidden.total + jnp.sum(hidden.outputs, axis=0).astype(hidden.total.dtype)
