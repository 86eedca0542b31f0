"""Compactor (2507.08143): how far a key sticks out of the others, and what its neighbourhood attends to.

Both parts need no model and no causal order: leverage scores of sketched keys, and attention inside chunks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.learned.padding import Lengths, check_heads, clean, protect, real_rows
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.scores import pooled

HIGHEST = jax.lax.Precision.HIGHEST
SKETCH = 48
JITTER = 1e-2
NEIGHBOURS = 3


@own_settings()
def compactor(
    queries: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    keys_before_rotation: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    sketch: Float[Array, "#B #K D S"],
    blending: float | Float[Array, " B"],
    *,
    chunk: int = 256,
    first: int = 8,
    last: int = 4,
    mask_padding: bool = True,
    lengths: Lengths = None,
) -> Float[Array, "B K N"]:
    """blending * leverage + attention inside chunks, both standardised over the layer (Compactor, sections 3 and 4).

    Args:
        queries: post-RoPE.
        keys: post-RoPE.
        keys_before_rotation: the same keys pre-RoPE, for leverage.
        values: values.
        sketch: Gaussian matrix, divided by the root of its columns' number (`draw_sketch`).
        blending: weight of the leverage; kvpress takes the share of rows that is removed.
        chunk: rows of a chunk, counted from row `first` on.
        first: rows at the start that are left out.
        last: rows at the end that are left out.
        mask_padding: False fills the last chunk up with rows of zeros that are attended to, as kvpress 0.5.5 does.
        lengths: real rows of each sequence; N by default.

    Returns:
        scores, more is more; the greatest of the layer for the rows left out, -inf beyond `lengths`.

    Raises:
        ValueError: if shapes do not fit or a number is impossible.
    """
    check_heads(queries, keys, values)
    check_heads(queries, keys_before_rotation)
    check_counts(0, first=first, last=last)
    check_counts(1, chunk=chunk)
    real = real_rows(keys, lengths)
    slot, length = ordinals(keys.shape[2], 3), jnp.sum(real, axis=-1, keepdims=True)
    rows = (slot >= first) & (slot < length - last)
    weight = jnp.broadcast_to(jnp.asarray(blending, jnp.float32), keys.shape[:1])[:, None, None]
    attention = chunk_attention(queries, keys, values, rows, first, chunk, mask_padding)
    scores = weight * standardised(leverage(keys_before_rotation, sketch, rows), rows) + standardised(attention, rows)
    return protect(scores, real & ~rows, real)


@own_settings()
def draw_sketch(key: Array, dim: int, columns: int = SKETCH) -> Float[Array, "1 1 D S"]:
    """One Gaussian matrix N(0, 1) / sqrt(columns) for all heads and sequences, which so do not depend on a batch."""
    return jax.random.normal(key, (1, 1, dim, columns), jnp.float32) * columns**-0.5


def leverage(
    keys: Float[Array, "B K N D"], sketch: Float[Array, "#B #K D S"], rows: Bool[Array, "B K N"]
) -> Float[Array, "B K N"]:
    """x^T (X^T X + 1e-2)^-1 x of the centred, sketched keys of the mask; 0 elsewhere."""
    x = clean(keys, rows)
    mean = (
        jnp.sum(x, axis=2, keepdims=True) / jnp.maximum(jnp.sum(rows, axis=2, dtype=jnp.float32), 1.0)[..., None, None]
    )
    x = jnp.where(rows[..., None], x - mean, 0.0)
    x = jnp.matmul(x, jnp.broadcast_to(sketch, (*x.shape[:2], *sketch.shape[2:])), precision=HIGHEST)
    root = _cholesky(jnp.einsum("bkns,bknt->bkst", x, x, precision=HIGHEST))
    solved = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(x, -1, -2), lower=True)
    return jnp.sum(solved**2, axis=2)


def _cholesky(gram: Float[Array, "B K S S"]) -> Float[Array, "B K S S"]:
    """Root of gram + jitter, ten times as much of it wherever that fails in float32."""
    unit = jnp.eye(gram.shape[-1])[None, None]

    def failed(root: Array) -> Bool[Array, "B K 1 1"]:
        return jnp.any(~jnp.isfinite(root), axis=(-2, -1), keepdims=True)

    def again(state: tuple[Array, Array]) -> tuple[Array, Array]:
        jitter, root = state
        jitter = jnp.where(failed(root), 10 * jitter, jitter)
        return jitter, jnp.linalg.cholesky(gram + jitter * unit)

    jitter = jnp.full((*gram.shape[:2], 1, 1), JITTER)
    start = jitter, jnp.linalg.cholesky(gram + jitter * unit)

    def bounded(state):
        return jnp.any(failed(state[1]) & (state[0] < 1e30))

    return jax.lax.while_loop(bounded, again, start)[1]


def chunk_attention(
    queries: Float[Array, "B H N D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    rows: Bool[Array, "B K N"],
    first: int,
    chunk: int,
    mask_padding: bool,
) -> Float[Array, "B K N"]:
    """Attention that rows get inside their chunk, unscaled and not causal, times |v|, mean over 3 neighbours."""
    batch, kv_heads, count, dim = keys.shape
    if count <= first:
        return jnp.zeros(rows.shape, jnp.float32)
    chunks = -(-(count - first) // chunk)
    size = chunks * chunk

    def cut(x: Array) -> Array:
        """The rows from `first` on in chunks, chunks first."""
        x = x[:, :, first:]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, size - x.shape[2])] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(batch, x.shape[1], chunks, chunk, *x.shape[3:]), 2, 0)

    real = cut(rows)
    q = cut(clean(queries, rows[:, :1])).reshape(chunks, batch, kv_heads, -1, chunk, dim)
    # A chunk without any row pads no chunk that has some.
    mask = real if mask_padding else jnp.broadcast_to(jnp.any(real, axis=-1, keepdims=True), real.shape)

    def attend(part: tuple[Array, Array, Array]) -> Float[Array, "B K chunk"]:
        q, k, mask = part
        logits = jnp.einsum("bkgtd,bknd->bkgtn", q, k, precision=HIGHEST)
        weights = jax.nn.softmax(jnp.where(mask[:, :, None, None], logits, -1e30), axis=-1)
        return jnp.mean(jnp.sum(jnp.where(mask[:, :, None, :, None], weights, 0.0), axis=-2), axis=2)

    # A chunk after the other: logits of all at once are N x chunk for every query head.
    attention = jax.lax.map(attend, (q, cut(clean(keys, rows)), mask))
    attention = jnp.moveaxis(attention, 0, 2).reshape(batch, kv_heads, size)[:, :, : count - first]
    attention = attention * jnp.linalg.norm(clean(values, rows)[:, :, first:], axis=-1)
    attention = pooled(attention, NEIGHBOURS, "avg", jnp.sum(rows, axis=-1))
    return jnp.pad(attention, ((0, 0), (0, 0), (first, 0)))


def standardised(scores: Float[Array, "B K N"], rows: Bool[Array, "B K N"]) -> Float[Array, "B K N"]:
    """(x - mean) / standard deviation over all rows of the mask of a layer; the divisor is their number - 1."""
    count = jnp.sum(rows, axis=(1, 2), keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(rows, scores, 0.0), axis=(1, 2), keepdims=True) / jnp.maximum(count, 1.0)
    apart = jnp.where(rows, scores - mean, 0.0)
    deviation = jnp.sqrt(jnp.sum(apart**2, axis=(1, 2), keepdims=True) / jnp.maximum(count - 1, 1.0))
    return apart / jnp.maximum(deviation, 1e-6)
