"""Attention that every row of a prompt gets from all queries, in sum: what heavy hitters are chosen by (H2O)."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.accumulated_attention import pallas_gpu, pallas_tpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {
    "gpu": pallas_gpu.accumulated_attention,
    "tpu": pallas_tpu.accumulated_attention,
    "xla": reference.accumulated_attention,
}


def accumulated_attention(
    q: Float[Array, "B H N D"], keys: Float[Array, "B K N D"], lengths: Int[Array, " B"], *, backend: str | None = None
) -> Float[Array, "B K N"]:
    """Sums over the queries of causal attention's probabilities, softmax(q k / sqrt(D)), mean over query heads.

    Query n of a prompt sees the rows 0..n. Queries and keys at or beyond `lengths`, NaN included, have no effect;
    their sums are 0. Everything float32, and no array of N x N numbers anywhere.

    Raises:
        ValueError: if the backend is unknown, H is no multiple of K, or there are not as many queries as keys.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if q.shape[1] % keys.shape[1]:
        raise ValueError(f"Query heads must be a multiple of KV heads, got {q.shape[1]} and {keys.shape[1]}.")
    if q.shape[2] != keys.shape[2]:
        raise ValueError(f"Every token has a query and a key, got {q.shape[2]} and {keys.shape[2]}.")
    return dispatch("accumulated_attention", BACKENDS, backend, q, keys, lengths)
