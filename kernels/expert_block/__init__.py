"""A token behind attention through the rest of a layer of experts."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.expert_block import pallas_gpu, reference
from clusterkv_jax.kernels.splits import Splits

BACKENDS = {"gpu": pallas_gpu.expert_block, "xla": reference.expert_block}


def expert_block(
    splits: Splits,
    hidden: Float[Array, " M"],
    projection: Float[Array, "I M"],
    scale: Float[Array, " M"],
    router: Float[Array, "E M"],
    gate: Float[Array, "E M F"],
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
    *,
    per_token: int,
    normalize: bool,
    eps: float,
    offset: float,
    backend: str | None = None,
) -> Float[Array, " M"]:
    """The hidden state h = hidden + attended @ projection, with what its experts make of its norm added.

    The norm is `h / sqrt(mean(h²) + eps) * (offset + scale)`, the experts are those of `expert_products`.

    Args:
        splits: what attention leaves.
        hidden: of one token, of the dtype of the weights.
        projection: of the heads, H D = I.
        scale, eps, offset: of the norm before the experts.
        router: makes a logit for each expert.
        gate, up, down: weights of all experts, of which those of the chosen ones are read.
        per_token, normalize: static; as in `expert_products`.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    operands = splits, hidden, projection, scale, router, gate, up, down
    options = {"per_token": per_token, "normalize": normalize, "eps": eps, "offset": offset}
    return dispatch("expert_block", BACKENDS, backend, *operands, **options)
