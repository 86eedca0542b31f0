"""Row merge: the best edges of a matching join their rows, in place (CentroidKV section 5.3).

A head's cache is read through a list of the slots that it still holds, in positional order. A merge writes into the
slot of its b row and takes its a row off the list, so that a round moves the rows that change and no others.

    rows     0 1 2 3 4 5 6 7      list positions 0, 2 ... are A, 1, 3 ... are B
    edges    0>3 2>3 6>1          merged: slot 3 becomes the mean of 0, 2 and 3, slot 1 that of 1 and 6
    rows     1 3 4 5 7
"""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.quantised import StoredRows
from clusterkv_jax.kernels.row_merge import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

Squares = tuple[Float[Array, "B K C"] | None, Float[Array, "B K C"] | None]

BACKENDS = {"gpu": pallas_gpu.row_merge, "xla": reference.row_merge}


def row_merge(
    keys: StoredRows,
    values: StoredRows,
    degree: Float[Array, "B K C"],
    rows: Int[Array, "B K R"],
    length: Int[Array, "B K"],
    match: Int[Array, "B K A"],
    score: Float[Array, "B K A"],
    merges: Int[Array, " B"],
    squares: Squares = (None, None),
    *,
    chunk: int,
    backend: str | None = None,
) -> tuple[StoredRows, StoredRows, Float[Array, "B K C"], Int[Array, "B K R"], Squares]:
    """Merge the `merges` best edges of every head: highest score first, of equal ones the first.

    Many a rows may join one b row: keys and values become the degree-weighted mean, taken in float32 as
    k_b + sum n_a (k_a - k_b) / n, so that equal rows merge without any error, and degrees are summed. A mean of
    quantised rows is quantised as they are.

    Args:
        keys, values, degree: the slots, rows [B,K,C,D] as they are stored.
        rows: numbers of the slots held, in positional order; the first `length` entries are real.
        length: entries of `rows` that are real; heads that have overflowed may count more than there are.
        match: for list position 2a, the list position of its b row, in the same chunk of the list; -1 for none.
        score: of that edge, -inf for none. Both are what `chunked_matching` returns for `rows`.
        merges: edges to merge in every head of a sequence, at most those there are.
        squares: |k|² and |v|² of the slots, for whoever wants to know them of the rows that are left.
        chunk: rows per chunk, as in the matching.

    Returns:
        keys, values, degree: changed in the b rows alone; slots that are no longer on the list keep what they held.
        rows: the list without the a rows merged; its first `length - merges` entries are real.
        squares: changed in the b rows alone; None where there were none.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch(
        "row_merge", BACKENDS, backend, keys, values, degree, rows, length, match, score, merges, squares, chunk=chunk
    )
