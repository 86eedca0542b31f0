"""Attention over heads that share pages: each reads the rows of its own, one behind the other."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.paged_attention import pallas_gpu, reference
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.paged_attention, "xla": reference.paged_attention}


def paged_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B P S D"] | Quantised,
    values: Float[Array, "B P S D"] | Quantised,
    degree: Float[Array, "B P S"],
    length: Int[Array, "B K"],
    first: Int[Array, "B K"],
    *,
    soft_cap: float | None = None,
    degree_power: float = 1.0,
    backend: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """`biased_attention` of KV heads whose slots are those of their pages.

    Args:
        q: queries.
        keys, values, degree: of all pages.
        length: rows that each head holds; what is beyond its slots is none.
        first: the page that each head's slots begin with; they end where those of the next head begin.
        soft_cap: static, as in `biased_attention`.
        degree_power: static; the bias of a row is so many times the logarithm of its degree.

    Returns:
        output and log-sum-exp.

    Raises:
        ValueError: if the backend is unknown or H is no multiple of K.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if q.shape[2] % length.shape[1]:
        raise ValueError(f"Query heads must be a multiple of KV heads, got {q.shape[2]} and {length.shape[1]}.")
    options = {"soft_cap": soft_cap, "degree_power": degree_power}
    return dispatch("paged_attention", BACKENDS, backend, q, keys, values, degree, length, first, **options)
