"""Products with weights that stay in codes."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.quantised_linear import pallas_gpu, reference
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.quantised_linear, "xla": reference.quantised_linear}


def quantised_linear(
    x: Float[Array, "n inputs"], weights: QuantisedWeights, *, backend: str | None = None
) -> Float[Array, "n outputs"]:
    """`x` times the weights that the codes stand for, float32; nowhere in memory are all of these in numbers.

    Args:
        x: rows. Their type is the one that weights are multiplied in.
        weights: codes [inputs or half as many, outputs] of one matrix, on this device; see `kernels.weight_codes`.

    Raises:
        ValueError: if the backend is unknown, or the rows have not as many numbers as the weights have inputs.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if weights.codes.ndim != 2 or x.ndim != 2 or x.shape[1] != weights.inputs:
        raise ValueError(
            f"quantised_linear takes rows [n, {weights.inputs}] of weights that are one matrix, got {x.shape} "
            f"and codes {weights.codes.shape}."
        )
    return dispatch("quantised_linear", BACKENDS, backend, x, weights)
