"""The definition: group after group, by the ops that serve one group."""

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.biased_attention import biased_attention


def step_in_groups(
    q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, *, heads, soft_cap=None
):  # fmt: skip
    """See `clusterkv_jax.kernels.step_in_groups.step_in_groups`."""
    batch, _, query_heads, dim = q.shape
    kv_heads = sum(map(len, heads))
    by_kv_head = q.reshape(batch, 1, kv_heads, -1, dim)
    out = jnp.zeros_like(by_kv_head)
    lse = jnp.zeros(by_kv_head.shape[:-1], jnp.float32)
    count = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    after, longer = [], tuple(length + count for length in lengths)
    for group, length, end, mine in zip(buffers, lengths, longer, heads, strict=True):
        index = jnp.asarray(mine)
        keys, values, degree, positions, scores = group

        def of_heads(x, index=index):
            return jax.tree.map(lambda x: x[:, index], x)

        own = None if scores is None else new_scores[:, index]
        token = of_heads(new_keys), of_heads(new_values), new_positions, real
        group = append_rows(keys, values, degree, positions, length, *token, scores, own)
        queries = by_kv_head[:, :, index].reshape(batch, 1, -1, dim)
        part = biased_attention(queries, group[0], group[1], group[2], end, soft_cap=soft_cap, return_lse=True)
        out = out.at[:, :, index].set(part[0].reshape(batch, 1, len(mine), -1, dim))
        lse = lse.at[:, :, index].set(part[1].reshape(batch, 1, len(mine), -1))
        after.append(group)
    return out.reshape(q.shape), lse.reshape(batch, 1, query_heads), tuple(after), longer
