"""Products of few tokens with weights, the norm before them and what follows them: decoding reads weights and little
else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch, platform
from clusterkv_jax.kernels.token_products import pallas_gpu, reference
from clusterkv_jax.sharding import ambient_mesh

BACKENDS = {"gpu": pallas_gpu.token_products, "xla": reference.token_products}


@dataclass(frozen=True)
class After:
    """What follows the products, static: None of these, or one.

    Attributes:
        gate: name of the activation of the first of two products, by which the second is multiplied.
        head_dim: the outputs are heads of this size, whose halves are turned by angles.
        wide: float32 outputs.
    """

    gate: str | None = None
    head_dim: int | None = None
    wide: bool = False


def serves(x: Float[Array, "B T M"], weights: Array) -> bool:
    """Whether few tokens are multiplied by a kernel here rather than in XLA."""
    few = x.shape[0] * x.shape[1] <= pallas_gpu.MOST_TOKENS
    mesh = ambient_mesh()
    alone = mesh is None or mesh.size == 1
    return few and alone and platform() == "gpu" and x.dtype == weights.dtype == jnp.bfloat16


def token_products(
    x: Float[Array, "n R"],
    weights: Sequence[Float[Array, "_ _"]],
    *,
    across: bool,
    norm: tuple[Float[Array, " R"], float, float] | None = None,
    after: After = After(),
    residual: Float[Array, "n F"] | None = None,
    angles: tuple[Float[Array, "n half"], Float[Array, "n half"]] | None = None,
    backend: str | None = None,
) -> Any:
    """x, normalised if there is a norm, times each of the weights.

    Args:
        x: few tokens.
        weights: [R, F] if `across`, else [F, R]; F may differ from one to the next, except with `after.gate`.
        norm: scale, eps and offset of an RMS norm, `x / sqrt(mean(x²) + eps) * (offset + scale)`.
        after: see there.
        residual: is added to the only product.
        angles: cosines and sines of each token, for the first `len(weights) - 1` weights with `after.head_dim`: the
            keys and queries, but not the values.

    Returns:
        [n, F] of each of the weights in a tuple, of a single output without one; in the type of x, or float32.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    options = {"across": across, "norm": norm, "after": after, "residual": residual, "angles": angles}
    return dispatch("token_products", BACKENDS, backend, x, tuple(weights), **options)
