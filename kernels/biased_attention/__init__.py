"""Attention over a clustered cache: softmax(q k / sqrt(D) + log degree) v (CentroidKV equation 3)."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.biased_attention import pallas_gpu, pallas_tpu, reference
from clusterkv_jax.kernels.biased_attention.derivative import differentiable
from clusterkv_jax.kernels.quantised import Quantised
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {
    "gpu": differentiable(pallas_gpu.biased_attention),
    "tpu": differentiable(pallas_tpu.biased_attention),
    "xla": differentiable(reference.biased_attention),
}


def biased_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B K C D"] | Quantised,
    values: Float[Array, "B K C D"] | Quantised,
    degree: Float[Array, "B K C"],
    length: Int[Array, "B K"] | None = None,
    *,
    soft_cap: float | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    backend: str | None = None,
):
    """Every query attends to every row of its KV head with the logarithm of the row's degree as bias.

    A slot of degree 0, or at or beyond `length` where that is given, is empty: its content, NaN included, has no
    effect. A head without any row gives zeros and a log-sum-exp of -inf. Softmax in float32, output in the dtype of
    `q`. A `soft_cap` c makes of a score s c tanh(s / c), before the bias. Differentiable in `q`, `keys`, `values` and
    `degree`; the derivative of an empty slot is zero.

    Rows may be `Quantised`, keys and values alike: their codes are read as they are, and nothing is differentiable.

    Returns:
        out [B,T,H,D]; with `return_lse` also lse f32 [B,T,H], the log-sum-exp of the biased scores, by which outputs
        over disjoint sets of rows combine; with `return_probs` also probs f32 [B,H,C], each slot's probability summed
        over T.

    Raises:
        ValueError: if the backend is unknown or H is no multiple of K.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if q.shape[2] % keys.shape[1]:
        raise ValueError(f"Query heads must be a multiple of KV heads, got {q.shape[2]} and {keys.shape[1]}.")
    return dispatch(
        "biased_attention",
        BACKENDS,
        backend,
        q,
        keys,
        values,
        degree,
        length,
        soft_cap=soft_cap,
        return_lse=return_lse,
        return_probs=return_probs,
    )
