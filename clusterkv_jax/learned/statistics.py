"""Scores from keys and values alone, without queries: KeyDiff and LagKV."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.padding import Lengths, clean, real_rows
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.settings import own_settings

# Below it a range of values is none: a constant channel would divide by 0.
SMALLEST_RANGE = 1e-6


@own_settings()
def keydiff(keys: Float[Array, "B K N D"], *, lengths: Lengths = None) -> Float[Array, "B K N"]:
    """KeyDiff (Park et al., 2504.15364, section 3): how much a key differs from the mean direction of its head's keys.

    Args:
        keys: post-RoPE.
        lengths: real rows of each sequence, or of each of its heads [B,K]; N by default.

    Returns:
        -cos(k, mean of k / |k|); -inf beyond `lengths`. No row is protected.

    Raises:
        ValueError: for impossible lengths.
    """
    real = real_rows(keys, lengths)
    unit = _normalized(clean(keys, real))
    anchor = _normalized(jnp.sum(unit, axis=2, keepdims=True))
    return jnp.where(real, -jnp.sum(unit * anchor, axis=-1), -jnp.inf)


def _normalized(x: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@own_settings()
def lagkv(
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    *,
    sinks: int = 4,
    lag: int = 128,
    cross_scoring: bool = False,
    lengths: Lengths = None,
) -> Float[Array, "B K N"]:
    """LagKV (Liang et al., 2504.04704): how far a row stands out in its partition, on the scale of the next partition.

    Partitions are runs of `lag` rows behind the sinks. Channels are scaled by their least and greatest values in the
    next partition; a row's score is the softmax, over its partition, of the standard deviation over its channels, mean
    of keys and values. It is then replaced by its rank in the partition / lag, so that partitions share alike and
    scores tie; of equal rows in a partition the last has the best rank. `cross_scoring` keeps the score itself, so that
    partitions compete.

    Args:
        keys: post-RoPE.
        values: values.
        sinks: rows at the start that get 1.
        lag: rows of a partition; channels of a range below 1e-6 count as of that range.
        cross_scoring: whether scores are compared over partitions.
        lengths: real rows of each sequence, or of each of its heads [B,K]; N by default.

    Returns:
        scores in 0..1; 1 for sinks, the last whole partition and the rows behind it. Of fewer than sinks + 2 lag rows
        the latest are the best. -inf beyond `lengths`.

    Raises:
        ValueError: if shapes do not fit or a number is impossible.
    """
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape, got {keys.shape} and {values.shape}.")
    check_counts(0, sinks=sinks)
    check_counts(1, lag=lag)
    real = real_rows(keys, lengths)
    rows, length = ordinals(keys.shape[2], 3), jnp.sum(real, axis=-1, keepdims=True)
    short = (rows - sinks).astype(jnp.float32) / jnp.maximum(length - sinks, 1).astype(jnp.float32)
    short = jnp.where(rows < sinks, 1.0, short)
    partitions = (keys.shape[2] - sinks) // lag
    if partitions < 2:
        return jnp.where(real, short, -jnp.inf)

    x = jnp.stack([clean(each, real) for each in (keys, values)])
    x = x[:, :, :, sinks : sinks + partitions * lag].reshape(*x.shape[:3], partitions, lag, -1)
    inner = jnp.mean(jax.nn.softmax(_spread(x), axis=-1), axis=0)
    inner = inner if cross_scoring else _ranks(inner) / lag
    inner = inner.reshape(*inner.shape[:2], -1)
    inner = jnp.pad(inner, ((0, 0), (0, 0), (sinks, keys.shape[2] - sinks - inner.shape[2])), constant_values=1.0)
    last = sinks + ((length - sinks) // lag - 1) * lag
    long = jnp.where(rows < last, inner, 1.0)
    return jnp.where(real, jnp.where(length < sinks + 2 * lag, short, long), -jnp.inf)


def _spread(x: Float[Array, "2 B K P lag D"]) -> Float[Array, "2 B K P_1 lag"]:
    """Standard deviation of each row over its channels, scaled by the next partition; none for the last partition."""
    now, after = x[:, :, :, :-1], x[:, :, :, 1:]
    least, most = (f(after, axis=-2, keepdims=True) for f in (jnp.min, jnp.max))
    return jnp.std((now - least) / jnp.maximum(most - least, SMALLEST_RANGE), axis=-1, ddof=1)


def _ranks(scores: Float[Array, "*heads lag"]) -> Float[Array, "*heads lag"]:
    """0 for the lowest score of each run; of equal ones the last is the best."""
    return jnp.argsort(jnp.argsort(scores, axis=-1, stable=True), axis=-1).astype(jnp.float32)
