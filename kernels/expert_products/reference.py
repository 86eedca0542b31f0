"""The experts of few tokens in plain XLA: the definition."""

import jax
import jax.numpy as jnp


def expert_products(x, logits, gate, up, down, *, per_token, normalize):
    """See `clusterkv_jax.kernels.expert_products.expert_products`."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), per_token)
    if normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    rows = jnp.repeat(x, per_token, axis=0)

    def product(rows, weights):
        own = weights.at[chosen.reshape(-1)].get(mode="promise_in_bounds")
        precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        options = {"precision": precision, "preferred_element_type": jnp.float32}
        return jnp.einsum("rm,rmf->rf", rows, own, **options).astype(rows.dtype)

    rows = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down).astype(jnp.float32)
    return jnp.einsum("nkm,nk->nm", rows.reshape(*chosen.shape, -1), shares).astype(x.dtype)
