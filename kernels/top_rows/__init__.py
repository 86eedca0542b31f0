"""The highest scores of every head, as a mask."""

import jax
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.top_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.top_rows, "xla": reference.top_rows}


def top_rows(
    score: Float[Array, "B K A"], count: Int[Array, " B"] | Int[Array, "B K"], *, backend: str | None = None
) -> Bool[Array, "B K A"]:
    """Mask of the `count` highest scores of every head; of equal ones the first. -inf and NaN are never among them.

    Nothing is differentiated through it.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("top_rows", BACKENDS, backend, jax.lax.stop_gradient(score), count)
