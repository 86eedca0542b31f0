"""The experts of few tokens: a token's best experts, its way through each, and their outputs by its shares."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.expert_products import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.expert_products, "xla": reference.expert_products}


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
