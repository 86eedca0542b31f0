"""Causal attention on a CPU: scores in tiles that its caches hold, the softmax kept up from tile to tile.

A block of queries starts at the tile of its own keys and goes back. Tiles that none of its queries sees are skipped, so
half of the square is computed, and with a window as much for each query. Source: the online softmax of Milakov and
Gimelshein (2018), blocked as in FlashAttention (Dao et al. 2022, algorithm 1).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.soft_cap import capped

TILE = 256  # queries, and keys, at most
SCORES_AT_ONCE = 2**20  # of the sequences that are taken together, f32
LOWEST = -1e30  # below every score, and finite: a row that has seen no key yet is scaled by 0, not by NaN


def tiled_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H D"]:
    """`causal_attention` of the last T of N tokens, for so many sequences at a time as have few scores."""
    batch, length, heads, dim = q.shape
    together = max(1, SCORES_AT_ONCE // (heads * min(TILE, length) * min(TILE, k.shape[1])))
    sinks = None if sink_logits is None else sink_logits.reshape(k.shape[2], -1).astype(jnp.float32)
    attend = partial(_attend, sinks=sinks, window=window, soft_cap=soft_cap)
    operands = q.reshape(batch, length, k.shape[2], -1, dim), k, v
    if together < batch:
        out = jax.lax.map(lambda row: attend(*row), operands, batch_size=together)
    else:
        out = jax.vmap(attend)(*operands)
    return out.reshape(batch, length, heads, dim)


def visible(
    first_query: int | Int[Array, ""], queries: int, first_key: int | Int[Array, ""], keys: int, window: int | None
) -> Bool[Array, "T N"]:
    """Which of so many keys each of so many queries sees, from these positions on; before 0 there is no key."""
    key = first_key + jnp.arange(keys, dtype=jnp.int32)[None, :]
    query = first_query + jnp.arange(queries, dtype=jnp.int32)[:, None]
    return key <= query if window is None else (key <= query) & (key > query - window) & (key >= 0)


def _attend(
    q: Float[Array, "T K G D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    *,
    sinks: Float[Array, "K G"] | None,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T K G D"]:
    """One sequence: a block of queries after the other, and for each a tile of keys after the other."""
    queries, keys, dim = q.shape[0], k.shape[0], q.shape[3]
    blocks, tiles = math.ceil(queries / TILE), math.ceil(keys / TILE)
    block, tile = math.ceil(queries / blocks), math.ceil(keys / tiles)
    q = jnp.pad(q, ((0, blocks * block - queries), (0, 0), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, tiles * tile - keys), (0, 0), (0, 0))) for x in (k, v))
    if window is not None:
        tiles = min(tiles, math.ceil((window + block) / tile) + 1)
    columns, rows = k.transpose(1, 2, 0), v.swapaxes(0, 1)  # as the products of a tile take them
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    @jax.checkpoint
    def add_tile(state, query, first, number):
        peak, total, out = state
        tile_of = partial(jax.lax.dynamic_slice_in_dim, start_index=number * tile, slice_size=tile)
        product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        scores = capped(product("kgtd,kdn->kgtn", query, tile_of(columns, axis=2)) * dim**-0.5, soft_cap)
        scores = jnp.where(visible(first, block, number * tile, tile, window), scores, -jnp.inf)
        higher = jnp.maximum(peak, jax.lax.stop_gradient(jnp.max(scores, axis=-1)))
        weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
        out = out * kept[..., None] + product("kgtn,knd->kgtd", weights.astype(v.dtype), tile_of(rows, axis=1))
        return higher, total * kept + jnp.sum(weights, axis=-1), out

    @jax.checkpoint
    def attend_block(part):
        first, query = part[0], part[1].transpose(1, 2, 0, 3)
        own = jnp.minimum(first + block, keys) - 1  # the last key that the block sees

        def step(state, back):
            number = own // tile - back
            seen = number >= 0 if window is None else (number >= 0) & ((number + 1) * tile > first - window + 1)
            return jax.lax.cond(seen, add_tile, lambda state, *_: state, state, query, first, number), None

        each = query.shape[:3]
        state = jnp.full(each, LOWEST), jnp.zeros(each, jnp.float32), jnp.zeros(query.shape, jnp.float32)
        (peak, total, out), _ = jax.lax.scan(step, state, jnp.arange(tiles, dtype=jnp.int32))
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # what fills the last block up may see no key
        share = 1.0 if sinks is None else jax.nn.sigmoid(jnp.log(total) + peak - sinks[..., None])
        return (out * (share / total)[..., None]).astype(v.dtype).transpose(2, 0, 1, 3)

    firsts = keys - queries + block * jnp.arange(blocks, dtype=jnp.int32)
    out = jax.lax.map(attend_block, (firsts, q.reshape(blocks, block, *q.shape[1:])))
    return out.reshape(q.shape)[:queries]
