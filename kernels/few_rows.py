"""What the GPU kernels share that multiply few rows with large weights.

A program takes all inputs of a block of outputs. It reads weights as fast as programs that share the inputs of a block,
and leaves no sums to another launch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels.gpu import arange, dot, shared_memory, whole_block

ROWS = 16  # of a tile, as the matrix unit wants
LEAST = 16  # outputs and inputs of a block, as it wants too


def check_rows(op: str, x: Array, *weights: Array) -> None:
    """Raise NotImplementedError for rows and weights that `products` does not take."""
    if len(x) > ROWS or x.dtype not in (jnp.bfloat16, jnp.float16) or any(w.dtype != x.dtype for w in weights):
        raise NotImplementedError(
            f"The GPU kernel of {op} takes up to {ROWS} rows of bfloat16 or float16, as their weights, got {len(x)} of "
            f"{x.dtype}, and weights of {weights[0].dtype}."
        )


def fitted(op: str, sizes: Mapping[str, int], inputs: int, outputs: Sequence[int], tiles: int = 1) -> dict[str, int]:
    """Sizes whose blocks divide the inputs and each of the outputs, and whose stages have room, of so many `tiles`.

    `sums`, 1 by default, become fewer until each has a block of inputs.

    Raises NotImplementedError where blocks become too small.
    """
    block = min(whole_block(sizes["block"], n) for n in outputs)
    if min(block, inputs & -inputs) < LEAST:
        raise NotImplementedError(
            f"The GPU kernel of {op} takes inputs and outputs in blocks of {LEAST}, got {inputs} and "
            f"{', '.join(map(str, outputs))}."
        )
    sums = whole_block(sizes.get("sums", 1), inputs // LEAST)
    depth = whole_block(sizes["depth"], inputs // sums)
    stages = shared_memory() // (2 * sums * depth * (tiles * block + ROWS))
    return {**sizes, "block": block, "depth": depth, "sums": sums, "stages": max(1, min(sizes["stages"], stages))}


def tile_of_rows(x: Any) -> tuple[Array, Array]:
    """The numbers of a tile's rows [ROWS, 1], and which of them there are."""
    row = arange(ROWS)[:, None]
    return row, row < x.shape[0]


def products(
    x: Any,
    tiles: Callable[[Array], Sequence[Array]],
    *,
    block: int,
    count: int,
    depth: int,
    sums: int,
    contract: tuple[int, int],
) -> list[Array]:
    """A tile of the rows of x times each of `count` blocks of weights, float32 [ROWS, block].

    `tiles(inputs)` loads the weights of these inputs, which lie along axis `contract[1]`. Each of `sums` parts of the
    inputs has a sum of its own: the matrix unit adds to one sum step after step, and to several at once.
    """
    row, there = tile_of_rows(x)
    inputs = x.shape[1] // sums

    def body(i: Array, totals: tuple[tuple[Array, ...], ...]) -> tuple[tuple[Array, ...], ...]:
        return tuple(step(arange(depth, part * inputs + i * depth), own) for part, own in enumerate(totals))

    def step(at: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = plgpu.load(x.at[row, at[None, :]], mask=there, other=0.0)
        return tuple(total + dot(rows, tile, contract) for total, tile in zip(totals, tiles(at), strict=True))

    zeros = jnp.zeros((ROWS, block), jnp.float32)
    totals = jax.lax.fori_loop(0, inputs // depth, body, ((zeros,) * count,) * sums)
    return [reduce(jnp.add, parts) for parts in zip(*totals, strict=True)]
