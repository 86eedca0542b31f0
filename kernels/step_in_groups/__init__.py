"""A token enters the heads of several groups, whose slots differ in number, or of one whose heads share pages, and
attends to all of them.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.kernels.step_in_groups import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.step_in_groups, "xla": reference.step_in_groups}
Buffers = tuple[Any, Any, Array, Array | None, Array | None]


def step_in_groups(
    q: Float[Array, "B 1 H D"],
    new_keys: Float[Array, "B K 1 D"] | Quantised,
    new_values: Float[Array, "B K 1 D"] | Quantised,
    new_positions: Int[Array, "B 1"],
    real: Bool[Array, "B 1"],
    new_scores: Float[Array, "B K 1"] | None,
    buffers: tuple[Buffers, ...],
    lengths: tuple[Int[Array, "B _"], ...],
    first: Int[Array, "B K"] | None = None,
    *,
    heads: tuple[tuple[int, ...], ...],
    largest: int | None = None,
    soft_cap: float | None = None,
    degree_power: float = 1.0,
    backend: str | None = None,
) -> tuple[Float[Array, "B 1 H D"], Float[Array, "B 1 H"], tuple[Buffers, ...], tuple[Int[Array, "B _"], ...]]:
    """`append_rows` to each group of KV heads, then `biased_attention` over all of its rows.

    Args:
        q, new_keys, new_values: of one token, all heads in the model's order; rows as they are stored.
        new_positions, real: a token that is none is written nowhere, but attends.
        new_scores: of the token, for groups whose buffers have scores.
        buffers: of each group keys, values, degree, positions, scores, [B,heads,slots,...]; the last two may be None.
        lengths: rows that each head of a group holds.
        first: of one group of all heads whose buffers are pages [B,P,S,...]: the page that each head's slots begin
            with; they end where those of the next head begin.
        heads: static; the KV heads of each group, every head in one of them.
        largest: static; no head has more slots in pages than that, by default all.
        soft_cap: static, as in `biased_attention`.
        degree_power: static; the bias of a row is so many times the logarithm of its degree.

    Returns:
        output and log-sum-exp of all query heads, the buffers with the token's rows in them, and what the heads hold
        then; a token without a slot counts.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    operands = q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, first
    options = {"heads": heads, "largest": largest, "soft_cap": soft_cap, "degree_power": degree_power}
    return dispatch("step_in_groups", BACKENDS, backend, *operands, **options)
