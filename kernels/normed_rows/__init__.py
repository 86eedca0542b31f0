"""Few hidden states, or their sums with what a block adds, normalised by their root mean square."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.normed_rows import pallas_gpu, reference

BACKENDS = {"gpu": pallas_gpu.normed_rows, "xla": reference.normed_rows}


def normed_rows(
    x: Float[Array, "n M"],
    added: Float[Array, "more M"] | None,
    scale: Float[Array, " M"],
    *,
    eps: float,
    offset: float,
    rows: int,
    backend: str | None = None,
) -> tuple[Float[Array, "n M"], Float[Array, "rows M"]]:
    """x + added, and `y / sqrt(mean(y²) + eps) * (offset + scale)` of its rows y, with rows of zeros behind them.

    RMSNorm (Zhang and Sennrich, 2019, equation 4).

    Args:
        x: hidden states of few tokens.
        added: what a block adds to them, in its first n rows; None is nothing.
        scale: of the norm.
        eps, offset: static.
        rows: static; of the second result, at least n.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    options = {"eps": eps, "offset": offset, "rows": rows}
    return dispatch("normed_rows", BACKENDS, backend, x, added, scale, **options)
