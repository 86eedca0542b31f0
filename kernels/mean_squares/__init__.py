"""Mean squared length of the listed rows of every head."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.mean_squares import pallas_gpu, reference
from clusterkv_jax.kernels.quantised import Rows

BACKENDS = {"gpu": pallas_gpu.mean_squares, "xla": reference.mean_squares}


def mean_squares(
    rows: Rows, index: Int[Array, "B K R"], length: Int[Array, "B K"], *, backend: str | None = None
) -> Float[Array, "B K"]:
    """Mean of |x|² over the first `length` rows [B,K,C,D] that `index` lists, in float32; 1 where it would be 0.

    Rows that are not listed may hold anything.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("mean_squares", BACKENDS, backend, rows, index, length)
