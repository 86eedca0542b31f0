"""Accumulated attention in plain jnp, a block of queries at a time: the definition, and the path without a kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.runtime.dispatch import matmul_operands, matmul_precision

# Probabilities of one block of queries, in elements (f32): 256 MiB.
PROBABILITIES_AT_ONCE = 2**26


def accumulated_attention(
    q: Float[Array, "B H N D"], keys: Float[Array, "B K N D"], lengths: Int[Array, " B"], *, block: int | None = None
) -> Float[Array, "B K N"]:
    """See `clusterkv_jax.kernels.accumulated_attention.accumulated_attention`; `block` queries are taken at a time."""
    batch, heads, tokens, dim = q.shape
    kv_heads, row = keys.shape[1], jnp.arange(tokens)
    block = block or max(16, min(tokens, PROBABILITIES_AT_ONCE // max(1, batch * heads * tokens)))
    count = -(-tokens // block)
    real = row[None] < lengths[:, None]
    q, keys = (jnp.where(real[:, None, :, None], x, jnp.zeros((), x.dtype)) for x in (q, keys))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, count * block - tokens), (0, 0)))
    q = q.reshape(batch, kv_heads, heads // kv_heads, count, block, dim)

    def add(sums: Float[Array, "B K N"], number: Int[Array, ""]) -> tuple[Float[Array, "B K N"], None]:
        score = jnp.einsum(
            "bkgtd,bknd->bkgtn",
            *matmul_operands(q[:, :, :, number], keys),
            precision=matmul_precision(q.dtype),
            preferred_element_type=jnp.float32,
        )
        query = number * block + jnp.arange(block)
        probs = jax.nn.softmax(
            jnp.where((row[None] <= query[:, None])[None, None, None], score * dim**-0.5, -jnp.inf), axis=-1
        )
        probs = jnp.where((query[None] < lengths[:, None])[:, None, None, :, None], probs, 0.0)
        return sums + jnp.mean(jnp.sum(probs, axis=3), axis=2), None

    none = jnp.zeros((batch, kv_heads, tokens), jnp.float32)
    return jax.lax.scan(add, none, jnp.arange(count))[0]
