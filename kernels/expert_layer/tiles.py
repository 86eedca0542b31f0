"""Tiles on their way through shared memory, and a token's products with them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax._src.state.types import TransposeTransform
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxlib.mlir.dialects import vector as vectors
from jaxtyping import Array, Float

from clusterkv_jax.kernels.expert_layer.plan import COLUMNS, ROWS, SLOTS
from clusterkv_jax.kernels.hopper import ALONG_ROWS, FULL, spread

TILED = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
# Rows of heads, by blocks of their columns: as one copy of any number of slots fills [.., 2, slots, D], and as products
# read that, [.., 2, blocks, slots, columns]. jax has no public name for a transposition yet.
COPIED = (plgpu.TilingTransform((COLUMNS,)), TransposeTransform((0, 1, 3, 2, 4)), plgpu.SwizzleTransform(2 * COLUMNS))
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
Tile = tuple[Any, Any, Callable[[], None] | None]


def slot_of(t: Any) -> Any:
    """Where the t-th tile of a program is in its ring."""
    return jax.lax.rem(t, SLOTS)


def column(x: Float[Array, "rows 8"], which: Any = 0) -> Float[Array, " rows"]:
    """One of eight columns; the others may be whatever was in memory."""
    number = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=FULL)
    return jnp.sum(jnp.where(number == which, x, 0.0), axis=1)


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
        return tuple(column(total[...]) for total in accumulators)

    return pl.run_scoped(program, *[ACC((COLUMNS, 8), jnp.float32)] * sums)


def put(values: Float[Array, " n"], inputs: Any) -> None:
    """Write a vector where products read it: in the first row of eight, which swizzling leaves as it is."""

    def write(context: Any, values: Any, target: Any) -> None:
        del context
        for i, register in enumerate(values.registers.flat):
            place = _times(_plus(_thread(), 128 * i), values.layout.vec_size)
            vectors.store(register, target, _first_row(place))

    inline: Any = plgpu.inline_mgpu(arg_types=(spread(len(values)), plgpu.RefType(TILED)))(write)
    inline(values.astype(inputs.dtype), inputs)
    plgpu.commit_smem()


def put_columns(values: Float[Array, "64 8"], inputs: Any) -> None:
    """`put` of column after column."""

    def write(context: Any, values: Any, target: Any) -> None:
        del context
        several = ROWS // COLUMNS
        for i, register in enumerate(values.registers.flat):
            for j in range(2):
                row, number = _place(i, j)
                place = [_div(number, several), _number(0), _rem(number, several), _number(0), row]
                memref.store(_extract(register, j), target, place)

    inline: Any = plgpu.inline_mgpu(arg_types=(FULL, plgpu.RefType(TILED)))(write)
    inline(values.astype(inputs.dtype), inputs)
    plgpu.commit_smem()


def put_rows(values: Float[Array, "64 8"], inputs: Any) -> None:
    """Write columns where products read them: as the eight rows of a block. `commit_smem` is the caller's."""

    def write(context: Any, values: Any, target: Any) -> None:
        del context
        for i, register in enumerate(values.registers.flat):
            for j in range(2):
                number, row = _place(i, j)
                chunk = arith.xori(_div(number, 8), row)  # the swizzle
                place = arith.addi(_times(chunk, 8), _rem(number, 8))
                memref.store(_extract(register, j), target, [_number(0), _number(0), row, place])

    inline: Any = plgpu.inline_mgpu(arg_types=(FULL, plgpu.RefType(TILED)))(write)
    inline(values.astype(inputs.dtype), inputs)


def store_apart(values: Float[Array, " 64"], target: Any) -> None:
    """Write a column to memory, in which its numbers are apart."""

    def write(context: Any, values: Any, target: Any) -> None:
        del context
        for i, register in enumerate(values.registers.flat):
            row, _ = _place(i, 0)
            memref.store(_extract(register, 0), target, [row])

    inline: Any = plgpu.inline_mgpu(arg_types=(ALONG_ROWS, plgpu.RefType()))(write)
    inline(values, target)


def _place(i: int, j: int) -> tuple[Any, Any]:
    """The row and the column of a thread's number j in register i of 64 rows of 8."""
    warp, lane = _div(_thread(), 32), _rem(_thread(), 32)
    row = _plus(arith.addi(_times(warp, 16), _div(lane, 4)), 8 * i)
    return row, _plus(_times(_rem(lane, 4), 2), j)


def _first_row(place: Any) -> list[Any]:
    """Where the number at this place of a vector is in the first rows of tiles."""
    chunk, place = _div(place, ROWS), _rem(place, ROWS)
    return [chunk, _number(0), _div(place, COLUMNS), _number(0), _rem(place, COLUMNS)]


def _number(value: int) -> Any:
    return arith.constant(ir.IndexType.get(), value)


def _thread() -> Any:
    return arith.index_cast(ir.IndexType.get(), mgpu.utils.thread_idx())


def _plus(x: Any, value: int) -> Any:
    return arith.addi(x, _number(value))


def _times(x: Any, value: int) -> Any:
    return arith.muli(x, _number(value))


def _div(x: Any, value: int) -> Any:
    return arith.divui(x, _number(value))


def _rem(x: Any, value: int) -> Any:
    return arith.remui(x, _number(value))


def _extract(register: Any, i: int) -> Any:
    return vectors.extract(register, dynamic_position=[], static_position=[i])
