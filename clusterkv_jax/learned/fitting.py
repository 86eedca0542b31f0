"""A surrogate fitted to scores (KVzap, 2601.07891): ridge regression in closed form, of sums streamed over texts."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST
# Of the mean square of what enters the attention: hidden states of few texts are nearly collinear.
RIDGE = 1e-3


@jax.jit
def products(hidden: Float[Array, "N M"], scores: Float[Array, "K N"]) -> Float[Array, "M+1+K M+1+K"]:
    """Sums over rows of the products of hidden states, 1 and scores with each other; add them up over texts."""
    one = jnp.ones((hidden.shape[0], 1), jnp.float32)
    z = jnp.concatenate([hidden.astype(jnp.float32), one, scores.astype(jnp.float32).T], axis=1)
    return jnp.einsum("nz,ny->zy", z, z, precision=HIGHEST)


def ridge(
    sums: Float[np.ndarray, "M+1+K M+1+K"], heads: int, penalty: float = RIDGE
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, " K"]]:
    """The linear surrogate of the least squared error plus `penalty` times the mean square of what it reads, solved in
    double precision; and the share of the scores' variance that it explains, per KV head.

    Raises ValueError if fewer rows than inputs were summed.
    """
    inputs = len(sums) - heads - 1
    count = sums[inputs, inputs]
    if count <= inputs:
        raise ValueError(f"A surrogate of {inputs} inputs needs more than {inputs} rows of text, got {count:.0f}.")
    mean, gram = sums[inputs] / count, sums / count
    gram = np.delete(gram - mean[:, None] * mean[None], inputs, axis=0)
    gram = np.delete(gram, inputs, axis=1)
    mean = np.delete(mean, inputs)
    own, cross, spread = gram[:inputs, :inputs], gram[:inputs, inputs:], np.diag(gram)[inputs:]
    pull = penalty * np.trace(own) / inputs
    weights = np.linalg.solve(own + pull * np.eye(inputs), cross)
    error = spread - 2 * np.sum(weights * cross, axis=0) + np.sum(weights * (own @ weights), axis=0)
    explained = 1 - error / np.maximum(spread, np.finfo(np.float64).tiny)
    arrays = {"weights": weights, "bias": mean[inputs:] - mean[:inputs] @ weights}
    return {name: x.astype(np.float32) for name, x in arrays.items()}, explained
