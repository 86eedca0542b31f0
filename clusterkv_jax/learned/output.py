"""What a row means for the output of its layer: CriticalKV and DropKV, and norms of projected values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.linear import linear
from clusterkv_jax.cache.layers import LayerCache, from_tokens
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.kernels.weight_codes import QuantisedWeights, dequantised
from clusterkv_jax.learned.padding import Lengths, check_heads, clean, real_rows
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.scores import last_queries, pooled, probabilities

HIGHEST = jax.lax.Precision.HIGHEST
# Projected values of one head that exist at once, in rows.
ROWS_AT_ONCE = 2048


@own_settings()
def projected_norms(
    values: Float[Array, "B K N D"], output: Float[Array, "H D M"] | QuantisedWeights, *, order: int = 2
) -> Float[Array, "B H N"]:
    """|W_O^h v| of every value and every query head h that reads it; order 1 or 2.

    Args:
        values: values.
        output: a layer's output projection by query heads, `params["layers"][l]["attention"]["o"]`. One in codes is
            made numbers.
        order: of the norm.

    Raises:
        ValueError: if the shapes do not fit.
    """
    batch, kv_heads, count, dim = values.shape
    numbers = jnp.asarray(dequantised(output))
    heads = numbers.shape[0]
    if numbers.shape[1] != dim or heads % kv_heads:
        raise ValueError(f"output must be [H,{dim},M] with H a multiple of {kv_heads}, got {numbers.shape}.")
    rows = jnp.moveaxis(values.astype(jnp.float32), 1, 0).reshape(kv_heads, batch * count, dim)

    def of_head(head: Int[Array, ""]) -> Float[Array, " rows"]:
        weights = numbers[head].astype(jnp.float32)

        def norm(row: Float[Array, " D"]) -> Float[Array, ""]:
            return jnp.linalg.norm(linear(row, weights), ord=order)

        return jax.lax.map(norm, rows[head // (heads // kv_heads)], batch_size=min(ROWS_AT_ONCE, batch * count))

    norms = jax.lax.map(of_head, jnp.arange(heads)).reshape(heads, batch, count)
    return jnp.moveaxis(norms, 0, 1)


@own_settings()
def criticalkv(
    base: Float[Array, "B K N"],
    values: Float[Array, "B K N D"],
    output: Float[Array, "H D M"],
    first: int | Int[Array, " B"],
    *,
    epsilon: float = 1e-4,
    lengths: Lengths = None,
) -> Float[Array, "B K N"]:
    """CriticalKV (Feng et al., 2502.03805, algorithm 1): a base score, then weighted with what values do to the output.

    Args:
        base: scores of any kind, more is more; kvpress takes Expected Attention's without value norm.
        values: values.
        output: the layer's output projection by query heads.
        first: rows of each head that the base score chooses alone, B / 2 of a budget of B in the paper;
            kvpress counts max(1, int((1 - removed) N / 2)).
        epsilon: added to the base score before it is weighted.
        lengths: real rows of each sequence, or of each of its heads [B,K]; N by default.

    Returns:
        the greatest float32 for the first rows, for the others (base + epsilon) mean_h |W_O^h v|_1, h over the query
        heads of the KV head; -inf beyond `lengths`.

    Raises:
        ValueError: if shapes do not fit.
    """
    real = real_rows(values, lengths)
    base = jnp.where(real, base.astype(jnp.float32), -jnp.inf)
    norms = projected_norms(clean(values, real), output, order=1)
    weight = jnp.mean(norms.reshape(values.shape[0], values.shape[1], -1, values.shape[2]), axis=2)
    certain = top_rows(base, jnp.broadcast_to(jnp.asarray(first, jnp.int32), values.shape[:1]))
    scores = jnp.where(certain, jnp.finfo(jnp.float32).max, (base + epsilon) * weight)
    return jnp.where(real, scores, -jnp.inf)


@own_settings()
def dropkv(
    queries: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    *,
    window: int = 32,
    kernel: int = 7,
    epsilon: float = 1e-6,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B K N"]:
    """DropKV (OpenReview MqfNzH3TVH): the squared change of the last queries' outputs if a row alone is dropped.

    Args:
        queries: post-RoPE.
        keys: post-RoPE.
        values: values.
        window: queries at the end that are asked; their rows are protected.
        kernel: neighbours that a score is the mean of, an odd number.
        epsilon: keeps the change finite for a row that gets all attention.
        lengths: real tokens of each sequence; N by default.

    Returns:
        scores, more is more; the last `window` rows get the greatest of their head + 1, rows beyond `lengths` -inf.

    Raises:
        ValueError: if shapes do not fit or a number is impossible.
    """
    check_heads(queries, keys, values)
    check_counts(1, window=window, kernel=kernel)
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd number of rows, got {kernel}.")
    real = real_rows(keys, lengths)
    counts = jnp.sum(real[:, 0], axis=-1, dtype=jnp.int32)
    at = counts[:, None] - window + ordinals(window, 2)
    rows = from_tokens(keys, values, counts)
    scores = drop_scores(last_queries(queries, counts, window), at, rows, kernel, epsilon)
    late = ordinals(keys.shape[2], 3) >= counts[:, None, None] - window
    best = jnp.max(scores, axis=2, keepdims=True)
    return jnp.where(real, jnp.where(late, best + 1, scores), -jnp.inf)


def drop_scores(
    queries: Float[Array, "B H W D"], positions: Int[Array, "B W"], rows: LayerCache, kernel: int, epsilon: float
) -> Float[Array, "B K C"]:
    """`dropkv` of a cache's rows for these queries at these positions, without protected rows."""
    assert rows.positions is not None
    visible = rows.positions[:, :, None] <= positions[:, None, :, None]
    p = probabilities(queries, rows, visible)
    values = rows.values.astype(jnp.float32)
    # Distances do not depend on the origin, and squares cancel less where it is near.
    count = jnp.maximum(rows.length, 1).astype(jnp.float32)[..., None, None]
    values = values - jnp.sum(values, axis=2, keepdims=True) / count
    outputs = jnp.einsum("bkgtc,bkcd->bkgtd", p, values, precision=HIGHEST)
    cross = jnp.einsum("bkgtd,bkcd->bkgtc", outputs, values, precision=HIGHEST)
    value_squares = jnp.sum(values**2, axis=-1)[:, :, None, None]
    distance = jnp.maximum(value_squares - 2 * cross + jnp.sum(outputs**2, axis=-1, keepdims=True), 0.0)
    scores = jnp.mean(jnp.sum((p / (1 - p + epsilon)) ** 2 * distance, axis=-2), axis=2)
    return pooled(scores, kernel, "avg", rows.length)
