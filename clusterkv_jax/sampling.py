"""From logits to the next token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from clusterkv_jax.runtime.errors import check_fields, is_count, is_number, shown
from clusterkv_jax.runtime.prng import MOST_SEED
from clusterkv_jax.runtime.sharding import first_greatest

# Logits of a model, divided by it, are finite in float32.
LEAST_TEMPERATURE = 1e-30
# In place of a token where a logit is not finite; -1 is none.
NOT_FINITE = -2


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; static under jit.

    `temperature` 0 is greedy. Otherwise the filters apply in this order to the logits divided by the temperature:
    `top_k` keeps the k most likely tokens, `top_p` the smallest set whose probability reaches p, `min_p` the tokens
    with at least min_p times the probability of the most likely one. None switches a filter off, and so do what other
    servers call off: `top_k` 0 or -1, `top_p` 1, `min_p` 0. The most likely token is always kept, so that filters have
    no effect at temperature 0.
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
            (
                "top_k",
                self.top_k is None or is_count(self.top_k, -1),
                "a whole number of at least 1, or None, 0 or -1 for all tokens",
            ),
            ("top_p", self.top_p is None or (is_number(self.top_p) and 0 < self.top_p <= 1), "above 0 and at most 1"),
            ("min_p", self.min_p is None or (is_number(self.min_p) and 0 <= self.min_p <= 1), "between 0 and 1"),
        )
        # One program for all that draws alike.
        for name, off in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,))):
            if self.temperature == 0 or getattr(self, name) in off:
                object.__setattr__(self, name, None)


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raise ValueError unless a seed is a whole number that keys tell from every other."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= MOST_SEED:
        raise ValueError(f"{name} must be a whole number from 0 to {MOST_SEED}, got {shown(seed)}.")


def check_seeds(seed: Any, count: int) -> None:
    """Raise ValueError unless it is a seed, or a list of as many seeds as there are requests."""
    if np.ndim(seed) == 0:
        check_seed(seed)
        return
    if len(seed) != count:
        raise ValueError(f"Seeds must be one per prompt, got {len(seed)} for {count} prompts.")
    for number, each in enumerate(seed):
        check_seed(each, f"seed {number}")


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, "..."], step: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """The next token of each row; `step` numbers the draw, so that a request's draws do not depend on how it is run.

    With a key for each row no row's draw depends on the others; one key draws for all.
    """
    if sampling.temperature == 0:
        return first_greatest(logits)[0]
    scores = filtered(logits.astype(jnp.float32) / sampling.temperature, sampling)
    if key.ndim == 0:
        return jax.random.categorical(jax.random.fold_in(key, step), scores).astype(jnp.int32)
    return jax.vmap(draw_one, (0, None, 0))(key, step, scores)


def draw_one(key: Key[Array, ""], step: Int[Array, ""] | int, scores: Float[Array, " V"]) -> Int[Array, ""]:
    """A token of one request, whose draws `step` numbers, by scores that the filters have seen."""
    return jax.random.categorical(jax.random.fold_in(key, step), scores).astype(jnp.int32)


@jax.named_scope("sampling")
def next_token(
    logits: Float[Array, "B V"], sampling: Sampling, key: Key[Array, "..."], step: Int[Array, ""] | int
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
