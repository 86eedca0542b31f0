"""A token through a whole layer of experts: its heads, its entry into the cache, attention, projection and experts."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.expert_layer import pallas_gpu, reference
from clusterkv_jax.kernels.pending import Pending

BACKENDS = {"gpu": pallas_gpu.expert_layer, "xla": reference.expert_layer}
Buffers = tuple[Array, Array, Array, Array | None]


class Weights(NamedTuple):
    """Of a layer of experts, in the order in which the token meets them."""

    scale: Float[Array, " M"]
    q: Float[Array, "I M"]
    k: Float[Array, "KD M"]
    v: Float[Array, "KD M"]
    q_scale: Float[Array, " D"]
    k_scale: Float[Array, " D"]
    projection: Float[Array, "I M"]
    behind: Float[Array, " M"]
    router: Float[Array, "E M"]
    gate: Float[Array, "E M F"]
    up: Float[Array, "E M F"]
    down: Float[Array, "E F M"]


def expert_layer(
    hidden: Pending,
    token: tuple[Int[Array, "1 1"], Bool[Array, "1 1"]],
    angles: tuple[Float[Array, " half"], Float[Array, " half"]],
    weights: Weights,
    buffers: tuple[Buffers, ...],
    lengths: tuple[Int[Array, "1 _"], ...],
    *,
    heads: tuple[tuple[int, ...], ...],
    per_token: int,
    normalize: bool,
    eps: float,
    offset: float,
    backend: str | None = None,
) -> tuple[Pending, tuple[Buffers, ...], tuple[Int[Array, "1 _"], ...]]:
    """`head_products` of a norm, `turned_heads`, `step_in_groups`, and what their outputs become behind attention.

    With h = hidden + attended @ projection that is h and what its experts make of its norm, as in `expert_products`.

    Args:
        hidden: of one token, of the dtype of the weights.
        token: its position, and whether it is one: what is none is written nowhere, but attends.
        angles: cosines and sines of its position, float32.
        weights: `scale` and `behind` are of the norms before attention and before the experts,
            `h / sqrt(mean(h²) + eps) * (offset + scale)`, and `router` makes a logit for each expert.
        buffers, lengths, heads: as in `step_in_groups`, without scores.
        per_token, normalize: static; as in `expert_products`.
        eps, offset: static; of all norms.

    Returns:
        the hidden state, the buffers with the token's rows in them, and what the heads hold then.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    operands = hidden, token, angles, Weights(*weights), buffers, lengths
    options = {"heads": heads, "per_token": per_token, "normalize": normalize, "eps": eps, "offset": offset}
    return dispatch("expert_layer", BACKENDS, backend, *operands, **options)
