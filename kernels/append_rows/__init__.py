"""New tokens' rows behind those that a cache holds, in place: keys, values, degree, positions and scores at once."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.append_rows import pallas_gpu, reference
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.append_rows, "xla": reference.append_rows}


def append_rows(
    keys: Float[Array, "B K C D"] | Quantised,
    values: Float[Array, "B K C D"] | Quantised,
    degree: Float[Array, "B K C"],
    positions: Int[Array, "B K C"] | None,
    length: Int[Array, "B K"],
    new_keys: Float[Array, "B K T D"] | Quantised,
    new_values: Float[Array, "B K T D"] | Quantised,
    new_positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    scores: Float[Array, "B K C"] | None = None,
    new_scores: Float[Array, "B K T"] | None = None,
    *,
    backend: str | None = None,
) -> tuple[Any, Any, Float[Array, "B K C"], Int[Array, "B K C"] | None, Float[Array, "B K C"] | None]:
    """Token t of a sequence enters the slots `length + t` of its heads, with degree 1.

    Args:
        keys, values, degree, positions: the slots; positions may be None.
        length: rows that each head holds; less than 0 where the slots are the later ones of a head, and tokens may
            belong before them.
        new_keys, new_values, new_positions: of T tokens; rows are converted to the dtype of the slots, and quantised in
            the same codes where those are.
        real: tokens that are none, and tokens without a slot, are written nowhere.
        scores, new_scores: of the slots and of the tokens, in one dtype; both may be None.

    Returns:
        keys, values, degree, positions, scores: the same but for those slots.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    args = (keys, values, degree, positions, length, new_keys, new_values, new_positions, real, scores, new_scores)
    return dispatch("append_rows", BACKENDS, backend, *args)
