"""The definition: one op after the other, each in plain XLA."""

import jax.numpy as jnp

from clusterkv_jax.kernels.expert_products import reference as products
from clusterkv_jax.kernels.head_products import reference as projections
from clusterkv_jax.kernels.normed_rows import reference as norms
from clusterkv_jax.kernels.pending import Pending, whole
from clusterkv_jax.kernels.split_product import reference as product
from clusterkv_jax.kernels.step_in_groups import reference as steps
from clusterkv_jax.kernels.turned_heads import reference as turns


def expert_layer(
    hidden, token, angles, weights, buffers, lengths, *, heads, per_token, normalize, eps, offset
):  # fmt: skip
    """See `clusterkv_jax.kernels.expert_layer.expert_layer`: one row has the outputs of all experts."""
    state, dim = whole(hidden), weights.q_scale.shape[0]
    of_heads = tuple(x.reshape(-1, dim, x.shape[-1]) for x in (weights.q, weights.k, weights.v))
    norm = {"eps": eps, "offset": offset}
    q, k, v, _ = projections.head_products(state[None], of_heads, None, None, weights.scale, None, **norm)
    cos, sin = (x[None] for x in angles)
    q, k = turns.turned_heads(q, k, weights.q_scale, weights.k_scale, cos, sin, **norm)
    rows = (x[:, :, None].astype(group.dtype) for x, group in zip((k, v), buffers[0], strict=False))
    step = q[None], *rows, *token, None, tuple((*group, None) for group in buffers), lengths
    attended, _, after, lengths = steps.step_in_groups(*step, heads=heads)
    part = product.split_product(attended.reshape(-1), weights.projection, parts=1)[:, None]
    total, x, logits = norms.normed_rows(state[None], part, weights.behind, weights.router, **norm)
    route = {"per_token": per_token, "normalize": normalize}
    out = products.expert_products(x, logits, weights.gate, weights.up, weights.down, **route)
    outputs = jnp.zeros_like(hidden.outputs).at[0].set(out[0].astype(jnp.float32))
    return Pending(total[0], outputs, hidden.counters), tuple(group[:4] for group in after), lengths
