"""Outlier heads: which heads' keys have no similar neighbours and so lose most by clustering (Chelsea section 5.4)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.sharding import over_heads


def outlier_share(keys: Float[Array, "B K N D"], *, chunk: int = 256, threshold: float = 0.8) -> Float[Array, "B K"]:
    """Share of each head's A rows whose best cosine with a B row of their chunk is below `threshold`.

    An A row without any B row in its chunk counts as one without a similar neighbour. Outlier heads are those with the
    largest share.
    """

    def share(keys: Array) -> Array:
        _, score = chunked_matching(keys, chunk=chunk)
        return jnp.mean(score < threshold, axis=-1, dtype=jnp.float32)

    return over_heads(share, keys)
