"""A token's product with a matrix, in parts whose sum whoever takes it makes on the way."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.split_product import pallas_gpu, reference

BACKENDS = {"gpu": pallas_gpu.split_product, "xla": reference.split_product}


def split_product(
    x: Float[Array, " I"], weights: Float[Array, "I M"], *, parts: int, backend: str | None = None
) -> Float[Array, "parts M"]:
    """The products of equal parts of x with their rows of the weights; their sum is x @ weights.

    Args:
        x: what one token has before a projection, of the dtype of the weights.
        parts: static; a divisor of the I inputs.

    Returns:
        float32.

    Raises:
        ValueError: if `parts` does not divide the inputs, or the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if parts < 1 or len(x) % parts:
        raise ValueError(f"parts must divide the {len(x)} inputs, got {parts}.")
    return dispatch("split_product", BACKENDS, backend, x, weights, parts=parts)
