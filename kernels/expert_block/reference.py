"""The definition: one op after the other, each in plain XLA."""

from clusterkv_jax.kernels.expert_products import reference as products
from clusterkv_jax.kernels.normed_rows import reference as norms
from clusterkv_jax.kernels.split_product import reference as product
from clusterkv_jax.kernels.splits import combined


def expert_block(splits, hidden, projection, scale, router, gate, up, down, *, per_token, normalize, eps, offset):
    """See `clusterkv_jax.kernels.expert_block.expert_block`."""
    attended = combined(splits).astype(hidden.dtype).reshape(-1)
    part = product.split_product(attended, projection, parts=1)[:, None]
    total, x, logits = norms.normed_rows(hidden[None], part, scale, router, eps=eps, offset=offset)
    route = {"per_token": per_token, "normalize": normalize}
    return (total + products.expert_products(x, logits, gate, up, down, **route))[0]
