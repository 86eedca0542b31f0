"""Products of few tokens in plain XLA: the definition."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True), "relu": jax.nn.relu}


def token_products(x, weights, *, across, norm, after, residual, angles) -> Any:
    """See `clusterkv_jax.kernels.token_products.token_products`."""
    if norm is not None:
        scale, eps, offset = norm
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
        x = (wide * (offset + scale.astype(jnp.float32))[None]).astype(x.dtype)
    products = [_product(x, w, across) for w in weights]
    dtype = jnp.float32 if after.wide else x.dtype
    if after.gate is not None:
        gate, up = products
        return (ACTIVATIONS[after.gate](gate) * up).astype(dtype)
    if residual is not None:
        products = [residual.astype(jnp.float32) + products[0]]
    if angles is not None:
        products = [*(turned(p, *angles, after.head_dim) for p in products[:-1]), products[-1]]
    out = tuple(p.astype(dtype) for p in products)
    return out if len(out) > 1 else out[0]


def _product(x: Array, weights: Array, across: bool) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (0 if across else 1,)), ((), ()))
    return jax.lax.dot_general(x, weights, dims, precision=precision, preferred_element_type=jnp.float32)


def turned(x: Array, cos: Array, sin: Array, head_dim: int) -> Array:
    """Heads [n, heads D] with their halves turned against each other."""
    a, b = jnp.split(x.reshape(len(x), -1, head_dim), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
