"""Expected Attention (Devoto et al., 2510.00636): what queries of the future will attend to, as their past tells.

Queries before their rotation are taken for normally distributed. Those of the next `future` positions have the same
moments, turned by the mean of these positions' rotations, and the mean of exp(q k / sqrt(D)) over them has a closed
form.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.blocks.config import Rope
from clusterkv_jax.blocks.rope import decode, frequencies, turn
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.padding import check_heads, clean, masked_softmax, protect, real_rows
from clusterkv_jax.runtime.checks import check_counts, concrete
from clusterkv_jax.runtime.settings import own_settings

HIGHEST = jax.lax.Precision.HIGHEST
# Number of queries, their mean, and the sum of the outer products of their distances from it.
Moments = tuple[Float[Array, " B"], Float[Array, "B K G D"], Float[Array, "B K G D D"]]


@own_settings()
def expected_attention(
    queries: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    rope: Rope | None,
    *,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> Float[Array, "B K N"]:
    """Attention that the next `future` queries are expected to pay to each row, by the moments of the queries so far.

    (p + epsilon) |v| with p = softmax(k mu' / sqrt(D) + k C' k / 2D) per query head, mean over the heads of a group;
    mu' and C' are mean and covariance of the queries behind the sinks, turned by the mean rotation of the future
    (section 3 of the paper; as kvpress 0.5.5 counts).

    Args:
        queries: before their rotation, after the QK norm of a model that has one.
        keys: post-RoPE.
        values: values.
        rope: the model's rotations, None where it has none.
        sinks: rows at the start that are left out of moments and softmax.
        future: positions behind the prompt, 1 or more.
        covariance: whether the queries' covariance counts.
        value_norm: whether p is weighted with the lengths of the values.
        epsilon: added to p where it is weighted; 1e-2 is best where heads share a budget (AdaKV).
        lengths: real tokens of each sequence, N by default.

    Returns:
        scores, more is more; sinks the greatest of their layer + 1, rows beyond `lengths` -inf.

    Raises:
        ValueError: if shapes do not fit, a number is impossible, or a sequence has no row behind its sinks.
    """
    check_heads(queries, keys, values)
    check_counts(0, sinks=sinks)
    check_counts(1, future=future)
    real = real_rows(keys, lengths)
    counts = jnp.full(keys.shape[0], keys.shape[2], jnp.int32) if lengths is None else jnp.asarray(lengths)
    numbers = concrete(counts)
    if numbers is not None and numbers.min() <= sinks:
        raise ValueError(f"A sequence must have more tokens than sinks = {sinks}, got {numbers.min()}.")
    rows = real & (ordinals(keys.shape[2], 3) >= sinks)
    moments = query_moments(queries, rows[:, 0], keys.shape[1])
    scores = expected_scores(
        *(moments, keys, values, rows, counts, rope),
        future=future,
        covariance=covariance,
        value_norm=value_norm,
        epsilon=epsilon,
    )
    return protect(scores, real & ~rows, real, 1.0)


def query_moments(queries: Float[Array, "B H N D"], used: Bool[Array, "B N"], kv_heads: int) -> Moments:
    """Moments of the queries that are `used`, per query head."""
    x = clean(queries, used[:, None])
    x = x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])
    count = jnp.sum(used, axis=1, dtype=jnp.float32)
    mean = jnp.sum(x, axis=3) / jnp.maximum(count, 1.0)[:, None, None, None]
    # Of distances from the mean: the mean of squares less the square of the mean would cancel.
    x = jnp.where(used[:, None, None, :, None], x - mean[..., None, :], 0.0)
    return count, mean, jnp.einsum("bkgnd,bkgne->bkgde", x, x, precision=HIGHEST)


def joined_moments(first: Moments, second: Moments) -> Moments:
    """Moments of two sets of queries together (Chan et al., 1979)."""
    (count_1, mean_1, spread_1), (count_2, mean_2, spread_2) = first, second
    count, apart = count_1 + count_2, mean_2 - mean_1
    share = (count_2 / jnp.maximum(count, 1.0))[:, None, None, None]
    outer = apart[..., :, None] * apart[..., None, :]
    return (
        count,
        mean_1 + share * apart,
        spread_1 + spread_2 + (share * count_1[:, None, None, None])[..., None] * outer,
    )


def expected_scores(
    moments: Moments,
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    rows: Bool[Array, "B K N"],
    position: Int[Array, " B"],
    rope: Rope | None,
    *,
    future: int,
    covariance: bool,
    value_norm: bool,
    epsilon: float,
) -> Float[Array, "B K N"]:
    """`expected_attention` of the rows of the mask, 0 elsewhere; the next token stands at `position`."""
    count, mean, spread = moments
    dim = keys.shape[-1]
    keys, values = clean(keys, rows), clean(values, rows)
    linear = turned(mean, position, future, rope)
    square = turned_both_ways(spread / jnp.maximum(count, 1.0)[:, None, None, None, None], position, future, rope)

    def probability(head: tuple[Float[Array, "B K D"], Float[Array, "B K D D"]]) -> Float[Array, "B K N"]:
        logits = jnp.einsum("bknd,bkd->bkn", keys, head[0], precision=HIGHEST) * dim**-0.5
        if covariance:
            seen = jnp.einsum("bknd,bkde->bkne", keys, head[1], precision=HIGHEST)
            logits = logits + jnp.sum(seen * keys, axis=-1) / (2 * dim)
        return masked_softmax(logits, rows)

    # One query head of each group after the other: k C' is as large as the keys.
    heads = jnp.moveaxis(linear, 2, 0), jnp.moveaxis(square, 2, 0)
    score = jnp.mean(jax.lax.map(probability, heads), axis=0)
    if value_norm:
        score = (score + epsilon) * jnp.linalg.norm(values, axis=-1)
    return jnp.where(rows, score, 0.0)


def turned(x: Float[Array, "B ... D"], position: Int[Array, " B"], future: int, rope: Rope | None) -> Array:
    """x turned by the mean of the rotations of the `future` positions from `position` on: a contraction, unless the
    model's rotations lengthen what they turn.
    """
    if rope is None:
        return x
    at = (position[:, None] + ordinals(future, 2)).astype(jnp.float32)
    angles = at[..., None] * frequencies(rope)[None, None]
    shape = (x.shape[0], *[1] * (x.ndim - 2), -1)
    cos, sin = (rope.magnitude * jnp.mean(f(angles), axis=1).reshape(shape) for f in (jnp.cos, jnp.sin))
    return turn(x, cos, sin, rope)


def turned_both_ways(
    x: Float[Array, "B K G D D"], position: Int[Array, " B"], future: int, rope: Rope | None
) -> Float[Array, "B K G D D"]:
    """R x R^T with the mean rotation R."""
    once = jnp.swapaxes(turned(x, position, future, rope), -1, -2)
    return turned(once, position, future, rope)


def before_rotation(
    queries: Float[Array, "B H T D"], positions: Int[Array, "B T"], rope: Rope | None
) -> Float[Array, "B H T D"]:
    """Queries as they were before the rotation of their positions."""
    if rope is None:
        return queries
    return jnp.swapaxes(decode(jnp.swapaxes(queries, 1, 2), positions, rope), 1, 2)
