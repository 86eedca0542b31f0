"""Products of few rows in plain XLA: the definition."""

from functools import partial

import jax
import jax.numpy as jnp

# By the names of activations in a model's configuration.
GATES = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def row_products(x, weights, onto=None, gated=None, *, gate: str | None = None, share: float = 1.0):
    """See `clusterkv_jax.kernels.row_products.row_products`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(w):
        return jnp.einsum("ni,im->nm", x, w, precision=precision, preferred_element_type=jnp.float32)

    y = product(weights)
    if gate is not None:
        y = GATES[gate](y) * product(gated)
    return (y if onto is None else y + share * onto.astype(jnp.float32)).astype(x.dtype)
