"""The definition: group after group, by the ops that serve one group."""

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.degrees import raised
from clusterkv_jax.kernels.ordinals import ordinals


def step_in_groups(
    q, new_keys, new_values, new_positions, real, new_scores, buffers, lengths, first=None,
    *, heads, largest=None, soft_cap=None, degree_power=1.0,
):  # fmt: skip
    """See `clusterkv_jax.kernels.step_in_groups.step_in_groups`."""
    if first is not None:
        token = q, new_keys, new_values, new_positions, real, new_scores
        return _step_in_pages(*token, buffers[0], lengths[0], first, largest, soft_cap, degree_power)
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
        rows = group[0], group[1], raised(group[2], degree_power)
        part = biased_attention(queries, *rows, end, soft_cap=soft_cap, return_lse=True)
        out = out.at[:, :, index].set(part[0].reshape(batch, 1, len(mine), -1, dim))
        lse = lse.at[:, :, index].set(part[1].reshape(batch, 1, len(mine), -1))
        after.append(group)
    return out.reshape(q.shape), lse.reshape(batch, 1, query_heads), tuple(after), longer


def _step_in_pages(
    q, new_keys, new_values, new_positions, real, new_scores, buffers, length, first, largest, soft_cap, degree_power
):  # fmt: skip
    """The rows of each head are copied into slots of their own; the token's stand behind them here as there."""
    batch, pages, page = buffers[2].shape
    largest = pages * page if largest is None else largest
    capacity = jnp.diff(first, axis=1, append=pages) * page
    number = ordinals(largest, 3)
    at = jnp.where(number < capacity[..., None], first[..., None] * page + number, pages * page)

    def taken(x):
        flat = x.reshape(batch, pages * page, *x.shape[3:])
        return jax.vmap(lambda flat, at: jnp.take(flat, at, axis=0, mode="fill", fill_value=0))(flat, at)

    def put(x, rows):
        flat = x.reshape(batch, pages * page, *x.shape[3:])
        return jax.vmap(lambda flat, rows, at: flat.at[at].set(rows, mode="drop"))(flat, rows, at).reshape(x.shape)

    keys, values, degree, positions, scores = jax.tree.map(taken, buffers)
    end = length + jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    # A head that is full stores nothing.
    before = jnp.where(length < capacity, length, largest)
    own = None if scores is None else new_scores
    after = append_rows(keys, values, degree, positions, before, new_keys, new_values, new_positions, real, scores, own)
    within = jnp.minimum(end, capacity)
    rows = *after[:2], raised(after[2], degree_power)
    out, lse = biased_attention(q, *rows, within, soft_cap=soft_cap, return_lse=True)
    return out, lse, (jax.tree.map(put, buffers, after),), (end,)
