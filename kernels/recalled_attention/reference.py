"""Attention over recalled rows in two steps: gather them, attend to what was gathered."""

import jax.numpy as jnp

from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.ordinals import ordinals


def recalled_attention(q, keys, values, rows, since=None, length=None, *, unlisted=0, soft_cap=None, return_lse=False):
    """See `clusterkv_jax.kernels.recalled_attention.recalled_attention`."""
    batch, heads, queries, dim = q.shape
    if since is not None:
        late = since[:, None, None, None] + ordinals(unlisted, 4)
        rows = jnp.concatenate([rows, jnp.broadcast_to(late, (*rows.shape[:3], unlisted))], axis=-1)
    end = keys.shape[2] if length is None else length[..., None, None]
    rows = jnp.where(rows < end, rows, -1)
    each, count = rows.shape[2:]
    lists = rows.reshape(batch, heads, each * count)
    keys, values = (gather_rows(x, lists).reshape(batch, heads * each, count, dim) for x in (keys, values))
    degree = (rows >= 0).astype(jnp.float32).reshape(batch, heads * each, count)
    queries = q.reshape(batch, 1, heads * queries, dim)
    out, lse = biased_attention(queries, keys, values, degree, soft_cap=soft_cap, return_lse=True)
    return (out.reshape(q.shape), lse.reshape(q.shape[:3])) if return_lse else out.reshape(q.shape)
