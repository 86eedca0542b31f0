"""Chunked matching: for every A row its best B row of the same chunk (CentroidKV section 5.2)."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.chunked_matching import pallas_gpu, pallas_tpu, reference
from clusterkv_jax.kernels.quantised import StoredRows
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.chunked_matching, "tpu": pallas_tpu.chunked_matching, "xla": reference.chunked_matching}


def chunked_matching(
    features: StoredRows,
    *,
    chunk: int,
    bias: Float[Array, "B K N"] | None = None,
    normalize: bool = True,
    start: Int[Array, "B K"] | int | None = None,
    length: Int[Array, "B K"] | int | None = None,
    index: Int[Array, "B K R"] | None = None,
    values: StoredRows | None = None,
    key_weight: Float[Array, "B K"] | None = None,
    value_weight: float = 1.0,
    squares: tuple[Float[Array, "B K N"] | None, Float[Array, "B K N"] | None] = (None, None),
    backend: str | None = None,
) -> tuple[Int[Array, "B K A"], Float[Array, "B K A"]]:
    """Best partner of every A row of `features` [B,K,N,E] within its chunk, and the score of that edge.

    Rows `start` ... `start + length - 1` (default: all N) take part; chunks of `chunk` rows tile them from the first.
    In a chunk the rows at even offsets are A, those at odd offsets B, so A row a is row `start + 2a`.
    With `index`, row r is row `index[r]` of features and bias, and N is their number R: what a list names is matched
    where it lies.
    score(a, b) = f_a . f_b + bias_a + bias_b, in float32, with rows of f scaled to length 1 first if `normalize`.
    With `values` [B,K,N,D] instead, features being keys (GravityKV):
    score(a, b) = -key_weight |f_a - f_b|^2 / 2 + value_weight cos(v_a, v_b) + bias_a + bias_b.
    `squares` are |f|² and |v|² of each row, for backends that need not sum them then.

    Returns:
        match: the row number of A row a's best b (the lowest of equal ones), -1 where its chunk has no B row or where
            a is not a real row; A = ceil(N / 2).
        score: that edge's score, -inf where there is none.

    Raises:
        ValueError: if `chunk` is odd or below 2, only one of `values` and `key_weight` is given, or the backend is
            unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if chunk < 2 or chunk % 2:
        raise ValueError(f"chunk must be an even number of rows, at least 2, got {chunk}.")
    if (values is None) != (key_weight is None):
        raise ValueError("values and key_weight go together: give both or neither.")
    return dispatch(
        "chunked_matching",
        BACKENDS,
        backend,
        features,
        chunk=chunk,
        bias=bias,
        normalize=normalize,
        start=start,
        length=length,
        index=index,
        values=values,
        key_weight=key_weight,
        value_weight=value_weight,
        squares=squares,
    )
