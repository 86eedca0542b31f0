"""Which rows of a batch are real, for scores: everything here is float32, and padding holds whatever it likes."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.checks import concrete

Lengths = Int[Array | np.ndarray, "B #K"] | Int[Array | np.ndarray, " B"] | None


def real_rows(rows: Float[Array, "B K N D"], lengths: Lengths) -> Bool[Array, "B K N"]:
    """The first `lengths` rows of every sequence, or of each of its heads; all of them where that is None.

    Raises ValueError for lengths that are known and no numbers between 1 and N.
    """
    batch, heads, count, _ = rows.shape
    if lengths is None:
        return jnp.ones((batch, heads, count), bool)
    numbers = concrete(lengths.reshape(-1))
    if len(lengths) != batch or (numbers is not None and (numbers.min() < 1 or numbers.max() > count)):
        raise ValueError(f"lengths must be {batch} numbers between 1 and {count}, got {lengths}.")
    per_head = jnp.asarray(lengths).reshape(batch, -1, 1)
    return jnp.broadcast_to(ordinals(count, 3) < per_head, (batch, heads, count))


def clean(rows: Float[Array, "B heads N D"], real: Bool[Array, "B #heads N"]) -> Float[Array, "B heads N D"]:
    """Rows in float32, zeros where there are none."""
    return jnp.where(real[..., None], rows.astype(jnp.float32), 0.0)


def masked_softmax(logits: Float[Array, "*heads N"], mask: Bool[Array, "*#heads N"]) -> Float[Array, "*heads N"]:
    """Softmax over the rows of the mask; zeros elsewhere, and everywhere where the mask is empty."""
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weight = jnp.exp(logits - jnp.where(peak > -jnp.inf, peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1.0)


def protect(
    scores: Float[Array, "B K N"], rows: Bool[Array, "B K N"], real: Bool[Array, "B K N"], above: float = 0.0
) -> Float[Array, "B K N"]:
    """`rows` get the greatest score of the layer + `above`, rows that are not real -inf."""
    best = jnp.max(jnp.where(real, scores, -jnp.inf), axis=(1, 2), keepdims=True)
    return jnp.where(real, jnp.where(rows, best + above, scores), -jnp.inf)


def check_heads(queries: Float[Array, "B H N D"], keys: Float[Array, "B K N D"], values: Array | None = None) -> None:
    """Raise ValueError unless every KV head serves as many query heads, and all have as many rows."""
    if values is not None and keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape, got {keys.shape} and {values.shape}.")
    batch, heads, count, dim = queries.shape
    if (batch, count, dim) != (keys.shape[0], *keys.shape[2:]) or heads % keys.shape[1]:
        raise ValueError(
            f"queries must be [B,H,N,D] of keys [B,K,N,D] with H a multiple of K, got {queries.shape} and {keys.shape}."
        )
