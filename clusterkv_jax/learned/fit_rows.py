"""Rows of any method, refitted: biases and values that answer reference queries as all rows would (2602.16284).

`attention_matching` selects rows and solves by singular values. Here rows are there already, single ones or
centroids, and the fit goes from what they were: everything that is solved is a Gram matrix, summed over blocks of
queries, so that memory is O(t^2 + block N) and heads and sequences may be mapped over. The ridge pulls
towards what was there.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.settings import own_settings

HIGHEST = jax.lax.Precision.HIGHEST
# A weight changes by no more than this factor, e^3 as in the paper.
LARGEST_CHANGE = 3.0
STEPS = 2

TokenBlock = tuple[Float[Array, "T D"], Bool[Array, " T"]]


@own_settings()
def refit(
    queries: Float[Array, "n D"],
    keys: Float[Array, "N D"],
    values: Float[Array, "N D"],
    row_keys: Float[Array, "t D"],
    row_values: Float[Array, "t D"],
    log_bias: Float[Array, " t"],
    *,
    ridge: float = 1e-3,
    block: int = 256,
    real: Bool[Array, " N"] | None = None,
    used: Bool[Array, " n"] | None = None,
) -> tuple[Float[Array, " t"], Float[Array, "t D"]]:
    """Biases and values of one head's t rows, so that they answer the queries as the N rows do.

    Weights w = e^bias: least squares of the mass, within a factor of e^3 of what they were. Values, with these weights:
    least squares of the outputs. Jit-able with `ridge` and `block` static; vmap for more heads.

    Args:
        queries: reference queries, post-RoPE, of all query heads of the KV head.
        keys: of all rows, post-RoPE.
        values: of all rows.
        row_keys: of the rows to fit: some of the keys, or centroids.
        row_values: values as they were.
        log_bias: as they were: log degree, 0 of a single row, -inf of an empty slot, which stays one.
        ridge: pull towards what was there, relative to the norms of what is solved. 1e-6 is the unregularised fit as
            float32 solves it; 1e-3 answers queries that were not seen at least as well on the authors' cases.
        block: queries at once.
        real: which of the N rows there are; all by default.
        used: which of the queries count; all by default.

    Returns:
        log_bias and values, float32, in the order of the rows.

    Raises:
        ValueError: if shapes do not fit or a number is impossible.
    """
    if row_keys.shape != row_values.shape or log_bias.shape != row_keys.shape[:1]:
        raise ValueError(
            "row_keys and row_values must be [t,D] and log_bias [t], "
            f"got {row_keys.shape}, {row_values.shape} and {log_bias.shape}."
        )
    if keys.shape != values.shape or len({x.shape[1] for x in (queries, keys, row_keys)}) > 1:
        raise ValueError(
            "queries must be [n,D], keys and values [N,D] with the same D as the rows, "
            f"got {queries.shape}, {keys.shape} and {values.shape}."
        )
    check_counts(1, block=block)
    if not 0 <= ridge < float("inf"):
        raise ValueError(f"ridge must be a number of at least 0, got {ridge}.")
    real = jnp.ones(keys.shape[0], bool) if real is None else real
    used = jnp.ones(queries.shape[0], bool) if used is None else used
    there = log_bias > -jnp.inf
    keys, values = (jnp.where(real[:, None], x.astype(jnp.float32), 0.0) for x in (keys, values))
    row_keys, row_values = (jnp.where(there[:, None], x.astype(jnp.float32), 0.0) for x in (row_keys, row_values))
    queries = jnp.where(used[:, None], queries.astype(jnp.float32), 0.0) * queries.shape[1] ** -0.5
    blocks = _in_blocks(queries, used, block)

    def mass(sums: tuple[Array, Array], part: TokenBlock) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        query, counts = part
        score = jnp.where(real[None], jnp.matmul(query, keys.T, precision=HIGHEST), -jnp.inf)
        peak = jnp.max(score, axis=1, keepdims=True)
        weight = jnp.exp(score - peak)
        total = jnp.sum(weight, axis=1)
        output = jnp.matmul(weight, values, precision=HIGHEST) / total[:, None]
        rows = jnp.exp(jnp.matmul(query, row_keys.T, precision=HIGHEST) - peak)
        rows = jnp.where(there[None] & counts[:, None], rows, 0.0)
        gram, right = sums
        return (gram + _product(rows, rows), right + _product(rows, total[:, None])), (output, counts)

    count, dim = row_keys.shape
    start = jnp.zeros((count, count), jnp.float32), jnp.zeros((count, 1), jnp.float32)
    (gram, right), outputs = jax.lax.scan(mass, start, blocks)
    bias = jnp.where(there, _fit_log_weights(gram, right[:, 0], jnp.where(there, log_bias, 0.0), ridge), -jnp.inf)

    def apart(
        sums: tuple[Array, Array], part: tuple[TokenBlock, tuple[Array, Array]]
    ) -> tuple[tuple[Array, Array], None]:
        (query, counts), (output, _) = part
        score = jnp.matmul(query, row_keys.T, precision=HIGHEST) + bias[None]
        share = jnp.where(counts[:, None], jax.nn.softmax(score, axis=1), 0.0)
        gram, right = sums
        rest = output - jnp.matmul(share, row_values, precision=HIGHEST)
        return (gram + _product(share, share), right + _product(share, rest)), None

    start = jnp.zeros((count, count), jnp.float32), jnp.zeros((count, dim), jnp.float32)
    (gram, right), _ = jax.lax.scan(apart, start, (blocks, outputs))
    return bias, row_values + jnp.where(there[:, None], _solve(gram, right, ridge), 0.0)


def _fit_log_weights(
    gram: Float[Array, "t t"], right: Float[Array, " t"], log_bias: Float[Array, " t"], ridge: float
) -> Float[Array, " t"]:
    """Ridge regression from the weights there were, clipped, then projected steps of gradient descent."""
    before = jnp.exp(log_bias)

    def error(weight: Float[Array, " t"]) -> Float[Array, " t"]:
        return right - jnp.matmul(gram, weight, precision=HIGHEST)

    def bounded(weight: Float[Array, " t"]) -> Float[Array, " t"]:
        return jnp.clip(weight, before * np.exp(-LARGEST_CHANGE), before * np.exp(LARGEST_CHANGE))

    weight = bounded(before + _solve(gram, error(before)[:, None], ridge)[:, 0])
    pull = ridge * _norm(gram)
    for _ in range(STEPS):
        step = error(weight) + pull * (before - weight)
        weight = bounded(weight + step / ((1 + ridge) * _norm(gram)))
    return jnp.log(weight)


def _solve(gram: Float[Array, "t t"], right: Float[Array, "t D"], ridge: float) -> Float[Array, "t D"]:
    """(gram + ridge |gram|)^-1 right; rows and columns of zeros get zeros."""
    pull = jnp.maximum(ridge * _norm(gram), jnp.finfo(jnp.float32).tiny)
    return jax.scipy.linalg.solve(gram + pull * jnp.eye(gram.shape[0]), right, assume_a="pos")


def _norm(gram: Float[Array, "t t"]) -> Float[Array, ""]:
    """Bound of the spectral norm, tight where all entries are positive and alike: the greatest row sum."""
    return jnp.maximum(jnp.max(jnp.sum(jnp.abs(gram), axis=1)), jnp.finfo(jnp.float32).tiny)


def _product(first: Float[Array, "T t"], second: Float[Array, "T D"]) -> Float[Array, "t D"]:
    return jnp.matmul(first.T, second, precision=HIGHEST)


def _in_blocks(queries: Float[Array, "n D"], used: Bool[Array, " n"], block: int) -> tuple[Array, Array]:
    size = -(-queries.shape[0] // block) * block - queries.shape[0]
    queries, used = jnp.pad(queries, ((0, size), (0, 0))), jnp.pad(used, (0, size))
    return queries.reshape(-1, block, queries.shape[1]), used.reshape(-1, block)


def squared_errors(
    queries: Float[Array, "n D"],
    keys: Float[Array, "N D"],
    values: Float[Array, "N D"],
    row_keys: Float[Array, "t D"],
    fits: Sequence[tuple[Float[Array, " t"], Float[Array, "t D"]]],
    *,
    block: int = 256,
    real: Bool[Array, " N"] | None = None,
) -> Float[Array, " fits"]:
    """Sum over the queries of |what t rows answer - what all N rows answer|^2, for each pair of biases and values."""
    real = jnp.ones(keys.shape[0], bool) if real is None else real
    keys, values, row_keys = (x.astype(jnp.float32) for x in (keys, values, row_keys))
    blocks = _in_blocks(queries.astype(jnp.float32) * queries.shape[1] ** -0.5, jnp.ones(len(queries), bool), block)

    def answer(query: Array, keys: Array, values: Array, bias: Array) -> Float[Array, "T D"]:
        score = jnp.matmul(query, keys.T, precision=HIGHEST) + bias[None]
        return jnp.matmul(jax.nn.softmax(score, axis=1), values.astype(jnp.float32), precision=HIGHEST)

    def add(sums: Array, part: TokenBlock) -> tuple[Array, None]:
        query, counts = part
        whole = answer(query, keys, values, jnp.where(real, 0.0, -jnp.inf))
        apart = jnp.stack([answer(query, row_keys, row_values, bias) - whole for bias, row_values in fits])
        return sums + jnp.sum(jnp.where(counts[None, :, None], apart, 0.0) ** 2, axis=(1, 2)), None

    return jax.lax.scan(add, jnp.zeros(len(fits), jnp.float32), blocks)[0]
