"""A program's part of the experts: which one it is, its gate and up, and its outputs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import div, rem
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.expert_layer.plan import COLUMNS, ROWS, Plan
from clusterkv_jax.kernels.expert_layer.tiles import slot_of
from clusterkv_jax.kernels.hopper import ALONG_COLUMNS, ALONG_ROWS, FULL, load, spread, vector


def gate_block(mine: Any, u: Any, plan: Plan) -> tuple[Any, Any]:
    """Units and the share of the inputs that are block u of a program."""
    u = mine * plan.gate_blocks + u
    return pl.ds(div(u, plan.shares) * COLUMNS, COLUMNS), rem(u, plan.shares)


def fetch(
    weights: tuple[Any, Any, Any], ring: Any, arrived: Any, expert: Any, mine: Any, plan: Plan, before: Any, t: Any
) -> None:
    """Begin to copy tile t of an expert: gate and up in turns, then down; none behind the last."""
    slot = slot_of(before + t)

    def copy(source: Any, rows: Any, columns: Any) -> None:
        plgpu.copy_gmem_to_smem(source.at[expert, rows, columns], ring.at[slot], arrived.at[slot])

    i = div(t, 2)
    columns, part = gate_block(mine, div(i, plan.share_tiles), plan)
    rows = pl.ds((part * plan.share_tiles + rem(i, plan.share_tiles)) * ROWS, ROWS)
    for which in range(2):
        pl.when((t < plan.gate_tiles) & (rem(t, 2) == which))(partial(copy, weights[which], rows, columns))
    i = t - plan.gate_tiles
    block = mine * plan.down_blocks + div(i, plan.down_tiles)
    rows = pl.ds(rem(i, plan.down_tiles) * ROWS, ROWS)
    there = (i >= 0) & (i < plan.down_blocks * plan.down_tiles)
    pl.when(there)(partial(copy, weights[2], rows, pl.ds(block * COLUMNS, COLUMNS)))


def chosen(logits: Any, ranks: Any, place: Any) -> Int[Array, ""]:
    """The expert at this place among the best, of equal ones the first; leaves the places of all."""
    count, starts = logits.shape[0], range(0, logits.shape[0], 64)
    rivals = [load(logits.at[pl.ds(j, 64)], ALONG_COLUMNS, optimized=False) for j in starts]
    owns = [load(logits.at[pl.ds(i, 64)], ALONG_ROWS, optimized=False) for i in starts]
    number, other = (plgpu.broadcasted_iota(jnp.int32, (64, 64), axis, layout=FULL) for axis in (0, 1))
    earlier = other < number
    for i, own in zip(starts, owns, strict=True):
        ahead = []
        for j, rival in zip(starts, rivals, strict=True):
            mine, its = (jax.lax.broadcast_in_dim(x, (64, 64), (axis,)) for axis, x in enumerate((own, rival)))
            before = its > mine if j > i else its >= mine if j < i else (its > mine) | ((its == mine) & earlier)
            ahead.append(jnp.where(before, 1.0, 0.0))
        ranks[pl.ds(i, 64)] = jnp.sum(sum(ahead[1:], ahead[0]), axis=1)
    rank = vector(ranks.at[pl.ds(0, count)], count)
    number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=spread(count)).astype(jnp.float32)
    return jnp.sum(jnp.where(rank == place.astype(jnp.float32), number, 0.0)).astype(jnp.int32)


def share_of(logits: Any, ranks: Any, place: Any, per_token: int, normalize: bool) -> Float[Array, ""]:
    """The share of the expert at this place."""
    rank, value = vector(ranks.at[pl.ds(0, logits.shape[0])], logits.shape[0]), vector(logits)
    part = jnp.exp(value - jnp.max(value))
    share = jnp.sum(jnp.where(rank == place.astype(jnp.float32), part, 0.0))
    return share / jnp.sum(jnp.where(rank < per_token, part, 0.0) if normalize else part)
