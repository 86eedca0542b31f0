"""Queries and keys of few tokens normalised by heads, and turned by their positions."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.turned_heads import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.turned_heads, "xla": reference.turned_heads}


def turned_heads(
    q: Float[Array, "n H D"],
    k: Float[Array, "n K D"],
    q_scale: Float[Array, " D"],
    k_scale: Float[Array, " D"],
    cos: Float[Array, "n half"],
    sin: Float[Array, "n half"],
    *,
    eps: float,
    offset: float,
    backend: str | None = None,
) -> tuple[Float[Array, "n H D"], Float[Array, "n K D"]]:
    """Each head `x / sqrt(mean(x²) + eps) * (offset + scale)`, its halves a and b then `a cos - b sin, b cos + a sin`.

    Args:
        q, k: of few tokens.
        q_scale, k_scale: of the norms of queries and keys.
        cos, sin: float32, of each token's angles.
        eps, offset: static.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    operands = (q, k, q_scale, k_scale, cos, sin)
    return dispatch("turned_heads", BACKENDS, backend, *operands, eps=eps, offset=offset)
