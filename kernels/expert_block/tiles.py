"""Tiles of weights on their way through shared memory, and a token's products with them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import vector as vectors
from jaxtyping import Array, Float

from clusterkv_jax.kernels.expert_block.plan import COLUMNS, ROWS, SLOTS, Plan
from clusterkv_jax.kernels.hopper import FULL, spread

TILED = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
Tile = tuple[Any, Any, Callable[[], None] | None]


def slot_of(t: Any) -> Any:
    """Where tile t of an expert is in the ring."""
    return jax.lax.rem(t, SLOTS)


def gate_block(mine: Any, u: Any, plan: Plan) -> tuple[Any, Any]:
    """Units and the share of the inputs that are block u of a program."""
    u = mine * plan.gate_blocks + u
    return pl.ds(jax.lax.div(u, plan.shares) * COLUMNS, COLUMNS), jax.lax.rem(u, plan.shares)


def fetch(weights: tuple[Any, Any, Any], ring: Any, arrived: Any, expert: Any, mine: Any, plan: Plan, t: Any) -> None:
    """Begin to copy tile t of an expert: gate and up in turns, then down; none behind the last."""
    slot = slot_of(t)

    def copy(source: Any, rows: Any, columns: Any) -> None:
        plgpu.copy_gmem_to_smem(source.at[expert, rows, columns], ring.at[slot], arrived.at[slot])

    i = jax.lax.div(t, 2)
    columns, part = gate_block(mine, jax.lax.div(i, plan.share_tiles), plan)
    rows = pl.ds((part * plan.share_tiles + jax.lax.rem(i, plan.share_tiles)) * ROWS, ROWS)
    for which in range(2):
        pl.when((t < plan.gate_tiles) & (jax.lax.rem(t, 2) == which))(partial(copy, weights[which], rows, columns))
    i = t - plan.gate_tiles
    block = mine * plan.down_blocks + jax.lax.div(i, plan.down_tiles)
    rows = pl.ds(jax.lax.rem(i, plan.down_tiles) * ROWS, ROWS)
    there = (i >= 0) & (i < plan.down_blocks * plan.down_tiles)
    pl.when(there)(partial(copy, weights[2], rows, pl.ds(block * COLUMNS, COLUMNS)))


def products(
    ring: Any, inputs: Any, arrived: Any, sums: int, count: int, tile: Callable[[Any, int], Tile]
) -> tuple[Float[Array, " columns"], ...]:
    """The token's products with `sums` blocks of outputs, of `count` tiles each, which lie in turns.

    `tile(i, which)` says where tile i of a block is, with which inputs it is multiplied, and what to do once it has
    been. The tile's outputs are 64 rows of the matrix unit's product, and the token is the first of eight columns.
    """

    def program(*accumulators: Any) -> tuple[Array, ...]:
        @pl.loop(0, count)
        def _(i):
            for which, total in enumerate(accumulators):
                slot, chunk, then = tile(i, which)
                plgpu.barrier_wait(arrived.at[slot])
                plgpu.wgmma(total, ring.at[slot].transpose((1, 0)), inputs.at[chunk].transpose((1, 0)))
                if then is not None:
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # all have read the tile
                    then()

        plgpu.wgmma_wait(0)
        # The other columns are whatever was in memory.
        column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS, 8), 1, layout=FULL)
        return tuple(jnp.sum(jnp.where(column == 0, total[...], 0.0), axis=1) for total in accumulators)

    accumulator = plgpu.ACC((COLUMNS, 8), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(program, *[accumulator] * sums)


def put(values: Float[Array, " n"], inputs: Any) -> None:
    """Write a vector where products read it: in the first row of eight, which swizzling leaves as it is."""

    def write(context: Any, values: Any, target: Any) -> None:
        del context
        number = lambda n: arith.constant(ir.IndexType.get(), n)  # noqa: E731
        thread = arith.index_cast(ir.IndexType.get(), mgpu.utils.thread_idx())
        for i, register in enumerate(values.registers.flat):
            place = arith.muli(arith.addi(thread, number(128 * i)), number(values.layout.vec_size))
            chunk, place = arith.divui(place, number(ROWS)), arith.remui(place, number(ROWS))
            block, column = arith.divui(place, number(COLUMNS)), arith.remui(place, number(COLUMNS))
            vectors.store(register, target, [chunk, number(0), block, number(0), column])

    inline: Any = plgpu.inline_mgpu(arg_types=(spread(len(values)), plgpu.RefType(TILED)))(write)
    inline(values.astype(inputs.dtype), inputs)
    plgpu.commit_smem()
