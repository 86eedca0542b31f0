"""From logits to the next token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.errors import check_fields, is_count, is_number, shown
from clusterkv_jax.sharding import first_greatest

# Logits of a model, divided by it, are finite in float32.
LEAST_TEMPERATURE = 1e-30
# A key is made of 32 bits.
MOST_SEED = 2**32 - 1
# In place of a token where a logit is not finite; -1 is none.
NOT_FINITE = -2


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; static under jit.

    `temperature` 0 is greedy. Otherwise the filters apply in this order to the logits divided by the temperature:
    `top_k` keeps the k most likely tokens, `top_p` the smallest set whose probability reaches p, `min_p` the tokens
    with at least min_p times the probability of the most likely one. None switches a filter off. The most likely
    token is always kept. Greedy choice takes no filter.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("temperature", is_number(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            (
                "temperature",
                not (is_number(self.temperature) and 0 < self.temperature < LEAST_TEMPERATURE),
                f"0, which is greedy, or at least {LEAST_TEMPERATURE:g}",
            ),
            ("top_k", self.top_k is None or is_count(self.top_k, 1), "a whole number of at least 1"),
            ("top_p", self.top_p is None or (is_number(self.top_p) and 0 < self.top_p <= 1), "above 0 and at most 1"),
            ("min_p", self.min_p is None or (is_number(self.min_p) and 0 <= self.min_p <= 1), "between 0 and 1"),
        )
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        for name, value in filters.items():
            if self.temperature == 0 and value is not None:
                raise ValueError(f"Sampling {name} must be None at temperature 0, which is greedy, got {value!r}.")


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raise ValueError unless a seed is a whole number that keys tell from every other."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= MOST_SEED:
        raise ValueError(f"{name} must be a whole number from 0 to {MOST_SEED}, got {shown(seed)}.")


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, ""], step: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """The next token of each row; `step` numbers the draw, so that a request's draws do not depend on how it is run."""
    if sampling.temperature == 0:
        return first_greatest(logits)[0]
    scores = filtered(logits.astype(jnp.float32) / sampling.temperature, sampling)
    return jax.random.categorical(jax.random.fold_in(key, step), scores).astype(jnp.int32)


@jax.named_scope("sampling")
def next_token(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, ""], step: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """`sample`, and `NOT_FINITE` in sequences with a logit that is not finite: the host reads tokens anyway."""
    if sampling.temperature == 0:
        token, finite = first_greatest(logits)
    else:
        token, finite = sample(logits, sampling, key, step), jnp.isfinite(logits).all(axis=-1)
    return jnp.where(finite, token, NOT_FINITE)


def filtered(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Logits with every token that the filters exclude at -inf."""
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        least = jnp.min(jnp.where(before < sampling.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.min_p is not None and sampling.min_p > 0:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(sampling.min_p), logits, -jnp.inf)
    return logits
