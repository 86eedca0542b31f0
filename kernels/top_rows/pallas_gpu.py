"""The highest scores on GPU: a program per head, in one launch where XLA has four for each of 32 bits.

Bytes: the scores once, a byte for each. A head of up to 32,768 scores is held in registers, a longer one read again and
again from the nearest cache.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.best_scores import is_best, limit_of, tile_of, warps_of
from clusterkv_jax.kernels.gpu import arange, call

MOST_SCORES = 2**18  # of a head: one multiprocessor reads them some 30 times


def top_rows(score, count, *, interpret=False):
    """See `clusterkv_jax.kernels.top_rows.top_rows`."""
    batch, heads, scores = score.shape
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes):
        raise NotImplementedError("The GPU kernel of top_rows sees whole arrays: on a mesh it runs in shard_map alone.")
    if score.dtype != jnp.float32:
        raise NotImplementedError(f"The GPU kernel of top_rows reads float32, got {score.dtype}.")
    if not 0 < scores <= MOST_SCORES:
        raise NotImplementedError(
            f"The GPU kernel of top_rows takes 1 to {MOST_SCORES} scores of a head, got {scores}."
        )
    counts = jnp.broadcast_to(count.reshape(batch, -1), (batch, heads)).astype(jnp.int32)
    mask = call(
        partial(_kernel, scores=scores),
        jax.ShapeDtypeStruct((batch * heads, scores), jnp.int8),
        score.reshape(batch * heads, scores),
        counts.reshape(-1),
        grid=(batch * heads,),
        warps=warps_of(scores),
        interpret=interpret,
    )
    return mask.reshape(score.shape) != 0


def _kernel(score, count, mask, *, scores):
    head, size = pl.program_id(0), tile_of(scores)
    tiles = pl.cdiv(scores, size)

    def load(tile):
        number = tile * size + arange(size)
        return number, plgpu.load(score.at[head, number], mask=number < scores, other=-jnp.inf)

    limit, last = limit_of(load, size, tiles, scores, count[head])

    def write(tile, _):
        number, value = load(tile)
        best = is_best(value, number, limit, last).astype(jnp.int8)
        plgpu.store(mask.at[head, number], best, mask=number < scores)

    jax.lax.fori_loop(0, tiles, write, None)
