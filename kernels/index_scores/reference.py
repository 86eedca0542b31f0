"""Scores of an index as one product."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def index_scores(q: Float[Array, "B K G D"], index: Float[Array, "B K C D"]) -> Float[Array, "B K G C"]:
    """See `clusterkv_jax.kernels.index_scores.index_scores`."""
    wide = (x.astype(jnp.float32) for x in (q, index))
    return jnp.einsum("bkgd,bkcd->bkgc", *wide, precision=jax.lax.Precision.HIGHEST)
