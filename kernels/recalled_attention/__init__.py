"""Attention over rows by their index: softmax(q k / sqrt(D)) v over the recalled rows of a store of all keys."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.recalled_attention import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.recalled_attention, "xla": reference.recalled_attention}


def recalled_attention(
    q: Float[Array, "B K G D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    rows: Int[Array, "B K J R"],
    since: Int[Array, " B"] | None = None,
    length: Int[Array, "B K"] | None = None,
    *,
    unlisted: int = 0,
    soft_cap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Float[Array, "B K G D"] | tuple[Float[Array, "B K G D"], Float[Array, "B K G"]]:
    """The queries of a KV head attend to the rows named for them: J = G lists, or J = 1 for all of them.

    Args:
        rows: -1, or at or beyond `length`, is none.
        since: all queries attend to the `unlisted` rows from here on too, which no list names.
        length: rows there are; all N by default.
        unlisted: static; 0 without `since`.
        soft_cap: static; c makes of a score s c tanh(s / c).
        return_lse: static; return the log-sum-exp of the scores too, float32, -inf for a query without any row.

    Returns:
        in the dtype of `q`, zeros for a query without any row; the softmax is in float32.

    Raises:
        ValueError: if the backend is unknown, G is no multiple of J, or `unlisted` and `since` do not go together.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if q.shape[2] % rows.shape[2]:
        raise ValueError(f"Queries of a KV head must be a multiple of its lists, got {q.shape[2]} and {rows.shape[2]}.")
    if (since is None) != (unlisted == 0):
        raise ValueError(f"since and unlisted must be given together, got unlisted = {unlisted}.")
    args = (q, keys, values, rows, since, length)
    options = {"unlisted": unlisted, "soft_cap": soft_cap, "return_lse": return_lse}
    return dispatch("recalled_attention", BACKENDS, backend, *args, **options)
