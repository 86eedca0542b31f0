"""Few hidden states, normalised by their root mean square; and a few products."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.normed_rows, "xla": reference.normed_rows}


def normed_rows(
    x: Float[Array, "n M"],
    scale: Float[Array, " M"],
    weights: Float[Array, "E M"] | None = None,
    *,
    eps: float,
    offset: float,
    backend: str | None = None,
) -> tuple[Float[Array, "n M"], Float[Array, "n E"] | None]:
    """`x / sqrt(mean(x²) + eps) * (offset + scale)`; with weights the products of these rows, as a router's logits.

    RMSNorm (Zhang and Sennrich, 2019, equation 4).

    Args:
        x: hidden states of few tokens.
        scale: of the norm.
        weights: of few outputs, of the dtype of x; None is none, and no products.
        eps, offset: static.

    Returns:
        the normalised rows, and their products in float32.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("normed_rows", BACKENDS, backend, x, scale, weights, eps=eps, offset=offset)
