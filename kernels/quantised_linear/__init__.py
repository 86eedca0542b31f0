"""Products with weights that stay in codes."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.quantised_linear import pallas_gpu, reference
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.quantised_linear, "xla": reference.quantised_linear}


def quantised_linear(
    x: Float[Array, "n inputs"], *weights: QuantisedWeights, backend: str | None = None
) -> list[Float[Array, "n outputs"]]:
    """`x` times each of these weights, float32; nowhere in memory are all of what codes stand for in numbers.

    Args:
        x: rows. Their type is the one that weights are multiplied in.
        weights: each of them codes [inputs or half as many, outputs] of one matrix, on this device; see
            `kernels.weight_codes`.

    Raises:
        ValueError: if the backend is unknown, or the rows have not as many numbers as the weights have inputs.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    for own in weights:
        if own.codes.ndim != 2 or x.ndim != 2 or x.shape[1] != own.inputs:
            raise ValueError(
                f"quantised_linear takes rows [n, {own.inputs}] of weights that are one matrix, got {x.shape} "
                f"and codes {own.codes.shape}."
            )
    return dispatch("quantised_linear", BACKENDS, backend, x, *weights)
