"""Products with weights that stay in codes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.quantised_linear import by_halves, one_row_cpu, pallas_gpu, reference
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {
    "gpu": pallas_gpu.quantised_linear,
    "cpu": one_row_cpu.quantised_linear,
    "tpu": by_halves.quantised_linear,
    "xla": reference.quantised_linear,
}
OF_EXPERTS = {"gpu": pallas_gpu.quantised_experts, "xla": reference.quantised_experts}


def quantised_linear(
    x: Float[Array, "n inputs"], *weights: QuantisedWeights, dtype: Any = jnp.float32, backend: str | None = None
) -> list[Float[Array, "n outputs"]]:
    """`x` times each of these weights, in `dtype`; of few rows no matrix lies in memory as numbers.

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
    return dispatch("quantised_linear", BACKENDS, backend, x, *weights, dtype=dtype)


def quantised_experts(
    x: Float[Array, "n inputs"], owners: Int[Array, " R"], *weights: QuantisedWeights, backend: str | None = None
) -> list[Float[Array, "R outputs"]]:
    """Rows times the weights of their experts, float32; of the weights those of their experts are read.

    Args:
        x: rows, each of which goes through `R / n` experts.
        owners: the experts of the first row, then those of the second one, and so on.
        weights: each of them codes [experts, inputs or half as many, outputs].

    Raises:
        ValueError: if the backend is unknown, or rows and weights are not such.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    for own in weights:
        if own.codes.ndim != 3 or x.ndim != 2 or x.shape[1] != own.inputs or len(owners) % len(x):
            raise ValueError(
                f"quantised_experts takes rows [n, {own.inputs}], so many experts of each, and weights [experts, ...], "
                f"got {x.shape}, {len(owners)} experts and codes {own.codes.shape}."
            )
    return dispatch("quantised_experts", OF_EXPERTS, backend, x, owners, *weights)
