"""The experts of few tokens: a token's best experts, its way through each, and their outputs by its shares."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch, platform
from clusterkv_jax.kernels.expert_products import pallas_gpu, reference
from clusterkv_jax.sharding import ambient_mesh

BACKENDS = {"gpu": pallas_gpu.expert_products, "xla": reference.expert_products}


def serves(x: Float[Array, "B T M"], weights: Float[Array, "E M F"]) -> bool:
    """Whether a kernel takes these tokens through their experts here."""
    mesh = ambient_mesh()
    few = x.shape[0] * x.shape[1] <= pallas_gpu.MOST_TOKENS and (mesh is None or mesh.size == 1)
    return few and platform() == "gpu" and x.dtype == weights.dtype == jnp.bfloat16


def expert_products(
    x: Float[Array, "n M"],
    logits: Float[Array, "n E"],
    gate: Float[Array, "E M F"],
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
    *,
    per_token: int,
    normalize: bool,
    backend: str | None = None,
) -> Float[Array, "n M"]:
    """Of each token the sum of `down (silu(gate x) * up x)` over its `per_token` best experts, by their shares.

    Args:
        x: few tokens.
        logits: of the router, float32; of equal ones the first expert is chosen.
        gate, up, down: weights of all experts, of which those of the chosen ones are read.
        normalize: shares are softmax probabilities among the chosen experts rather than among all.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    route = {"per_token": per_token, "normalize": normalize}
    return dispatch("expert_products", BACKENDS, backend, x, logits, gate, up, down, **route)
