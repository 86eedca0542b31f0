"""Attention over rows by their index: softmax(q k / sqrt(D)) v over the recalled rows of a store of all keys."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import dispatch
from clusterkv_jax.kernels.recalled_attention import pallas_gpu, reference

BACKENDS = {"gpu": pallas_gpu.recalled_attention, "xla": reference.recalled_attention}


def recalled_attention(
    q: Float[Array, "B K G D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    rows: Int[Array, "B K J R"],
    *,
    backend: str | None = None,
) -> Float[Array, "B K G D"]:
    """The queries of a KV head attend to the rows named for them: J = G lists, or J = 1 for all of them.

    A row -1 is none. A query without any row gives zeros. Softmax in float32, output in the dtype of `q`.

    Raises:
        ValueError: if the backend is unknown or G is no multiple of J.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if q.shape[2] % rows.shape[2]:
        raise ValueError(f"queries of a KV head must be a multiple of its lists, got {q.shape[2]} and {rows.shape[2]}.")
    return dispatch("recalled_attention", BACKENDS, backend, q, keys, values, rows)
