"""Scores of an index: the products of a KV head's queries with everything that its index holds, in float32."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.index_scores import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.index_scores, "xla": reference.index_scores}


def index_scores(
    q: Float[Array, "B K G D"], index: Float[Array, "B K C D"], *, backend: str | None = None
) -> Float[Array, "B K G C"]:
    """q . index, every product and sum in float32 whatever the dtypes.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("index_scores", BACKENDS, backend, q, index)
