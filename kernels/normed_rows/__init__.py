"""Few hidden states, or their sums with what a block adds, normalised by their root mean square; and a few products."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference

BACKENDS = {"gpu": pallas_gpu.normed_rows, "xla": reference.normed_rows}


def normed_rows(
    x: Float[Array, "n M"],
    added: Float[Array, "parts n M"] | None,
    scale: Float[Array, " M"],
    weights: Float[Array, "E M"] | None = None,
    *,
    eps: float,
    offset: float,
    backend: str | None = None,
) -> tuple[Float[Array, "n M"], Float[Array, "n M"], Float[Array, "n E"] | None]:
    """x + added, and `y / sqrt(mean(y²) + eps) * (offset + scale)` of its rows y.

    With weights the products of the normalised rows too, such as the logits of a router.

    RMSNorm (Zhang and Sennrich, 2019, equation 4).

    Args:
        x: hidden states of few tokens.
        added: what a block adds to them, in parts to be added up; None is nothing.
        scale: of the norm.
        weights: of few outputs, of the dtype of x; None is none, and no products.
        eps, offset: static.

    Returns:
        the sums, the normalised rows, and their products in float32.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("normed_rows", BACKENDS, backend, x, added, scale, weights, eps=eps, offset=offset)
