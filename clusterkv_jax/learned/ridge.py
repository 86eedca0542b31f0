"""Surrogates fitted to scores (KVzap, 2601.07891): ridge regression in closed form, of sums streamed over texts."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from clusterkv_jax.learned.surrogates import predicted_scores

HIGHEST = jax.lax.Precision.HIGHEST
# Of the mean square of what enters the attention: hidden states of few texts are nearly collinear.
RIDGE = 1e-3


@dataclass(frozen=True)
class SurrogateFit:
    """A layer's surrogate.

    Attributes:
        arrays: what `predicted_scores` takes.
        explained: share of the scores' variance that it explains, R^2, by KV head.
        variance: of what it leaves unexplained, by KV head.
    """

    arrays: dict[str, np.ndarray]
    explained: Float[np.ndarray, " K"]
    variance: Float[np.ndarray, " K"]

    def expected(self, hidden: Float[np.ndarray, "R M"]) -> Float[np.ndarray, "K R"]:
        """Logarithm of the score that is expected of rows: of a log-normal number it lies above the mean logarithm."""
        predicted = predicted_scores(jax.tree.map(jnp.asarray, self.arrays), jnp.asarray(hidden)[None])
        return np.asarray(predicted[0]) + self.variance[:, None] / 2


@jax.jit
def products(hidden: Float[Array, "N M"], scores: Float[Array, "K N"]) -> Float[Array, "columns columns"]:
    """Sums over rows of the products of hidden states, 1 and scores with each other; add them up over texts."""
    one = jnp.ones((hidden.shape[0], 1), jnp.float32)
    z = jnp.concatenate([hidden.astype(jnp.float32), one, scores.astype(jnp.float32).T], axis=1)
    return jnp.einsum("nz,ny->zy", z, z, precision=HIGHEST)


@partial(jax.jit, donate_argnames=("total",))
def add_products(
    total: Float[Array, "columns columns"], hidden: Float[Array, "N M"], scores: Float[Array, "K N"]
) -> Float[Array, "columns columns"]:
    """`products` of one more text, added where the sums lie."""
    return total + products(hidden, scores)


def fit_ridge(sums: Float[np.ndarray, "columns columns"], heads: int) -> SurrogateFit:
    """The linear surrogate of least squares, with a penalty of `RIDGE` times the mean variance of its inputs; solved in
    double precision.

    Raises ValueError if no more rows than inputs were summed.
    """
    inputs = len(sums) - heads - 1
    check_rows(int(sums[inputs, inputs]), inputs)
    columns = np.delete(np.arange(len(sums)), inputs)
    mean = sums[inputs, columns] / sums[inputs, inputs]
    spread = sums[np.ix_(columns, columns)] / sums[inputs, inputs] - mean[:, None] * mean[None]
    own, cross, total = spread[:inputs, :inputs], spread[:inputs, inputs:], np.diag(spread)[inputs:]
    weights = np.linalg.solve(own + RIDGE * np.trace(own) / inputs * np.eye(inputs), cross)
    rest = np.maximum(total - 2 * np.sum(weights * cross, axis=0) + np.sum(weights * (own @ weights), axis=0), 0)
    arrays = {"weights": weights, "bias": mean[inputs:] - mean[:inputs] @ weights}
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    return SurrogateFit(arrays, 1 - rest / np.maximum(total, np.finfo(np.float64).tiny), rest)


def check_rows(rows: int, inputs: int) -> None:
    """Raise ValueError unless there are more rows of text than numbers to fit for a head."""
    if rows <= inputs:
        raise ValueError(f"A surrogate of {inputs} inputs needs more than {inputs} rows of text, got {rows}.")
