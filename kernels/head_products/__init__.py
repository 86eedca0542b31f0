"""Queries, keys and values of few tokens: a norm, products with the weights of all heads, and rotations.

A surrogate's scores come with them: it reads the same norm.
"""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.head_products import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.head_products, "xla": reference.head_products}


def head_products(
    x: Float[Array, "n M"],
    weights: tuple[Float[Array, "H D M"], Float[Array, "K D M"], Float[Array, "K D M"]],
    biases: tuple[Float[Array, "H D"], Float[Array, "K D"], Float[Array, "K D"]] | None = None,
    angles: tuple[Float[Array, "n half"], Float[Array, "n half"]] | None = None,
    scale: Float[Array, " M"] | None = None,
    surrogate: tuple[Float[Array, "S M"], Float[Array, " S"]] | None = None,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    backend: str | None = None,
) -> tuple[Float[Array, "n H D"], Float[Array, "n K D"], Float[Array, "n K D"], Float[Array, "n S"] | None]:
    """Queries, keys and values, in the dtype of x, and what a linear surrogate says of the tokens, float32.

    With `scale` those of `x / sqrt(mean(x²) + eps) * (offset + scale)`: RMSNorm (Zhang and Sennrich, 2019, equation 4).

    Args:
        x: what enters the attention of few tokens, of the dtype of the weights.
        weights, biases: of queries, keys and values.
        angles: cosines and sines, float32, by which the halves a and b of queries and keys are turned to
            `a cos - b sin, b cos + a sin`; None leaves them.
        scale: of a norm before the products; None is no norm. On a GPU of one token: of several XLA has it in a launch.
        surrogate: weights and bias, float32; None is none, and no scores. On a GPU of one token.
        eps, offset: static; of the norm.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    operands = x, weights, biases, angles, scale, surrogate
    return dispatch("head_products", BACKENDS, backend, *operands, eps=eps, offset=offset)
