"""Attention over pages in plain jnp: the definition. Every head has as many slots as there are in all pages."""

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.degrees import raised
from clusterkv_jax.kernels.ordinals import ordinals


def paged_attention(q, keys, values, degree, length, first, *, soft_cap=None, degree_power=1.0):
    """See `clusterkv_jax.kernels.paged_attention.paged_attention`."""
    pages, page = degree.shape[1:]
    begin = first * page
    slots = jnp.diff(begin, append=pages * page)
    at = jnp.minimum(begin[..., None] + ordinals(pages * page, 3), pages * page - 1)

    def of_heads(x):
        flat = x.reshape(x.shape[0], -1, *x.shape[3:])
        return jax.vmap(lambda rows, at: rows[at])(flat, at)

    keys, values, degree = jax.tree.map(of_heads, (keys, values, degree))
    rows = keys, values, raised(degree, degree_power), jnp.minimum(length, slots)
    return biased_attention(q, *rows, soft_cap=soft_cap, return_lse=True, backend="xla")
