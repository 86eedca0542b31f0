"""How far attention over quantised rows is from attention over the rows themselves, in float32, by the rows' number.

Queries, keys and values are normal numbers: no row stands out, so that an output is the mean of many values and small,
and errors of values weigh as much as they ever do. `--outliers` makes four columns of each key 20 times as large, as
some channels of real keys are. `--offset` adds to all keys a vector of this norm, as key biases do; `--whole` stores
them with their mean.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from clusterkv_jax.cache.attention import attend_cache
from clusterkv_jax.cache.layers import LayerCache, from_tokens, quantised
from clusterkv_jax.kernels.quantised import CODES

QUERIES, HEADS, DIM = 32, 8, 128


def errors(rows: int, seed: int, outliers: bool, offset: float, whole: bool) -> list[float]:
    """Relative error of the output: of bf16 rows, then of each kind of codes."""
    parts = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(parts[0], (1, 1, QUERIES, DIM))
    keys, values = (jax.random.normal(part, (1, HEADS, rows, DIM)) for part in parts[1:])
    if outliers:
        # Queries are as much smaller there, so that scores stay what they are.
        factor = jnp.where(jnp.arange(DIM) % 32 == 0, 20.0, 1.0)
        keys, q = keys * factor, q / factor
    keys += jnp.where(jnp.arange(DIM) < DIM // 2, 0.0, offset / (DIM // 2) ** 0.5)
    layer = from_tokens(keys, values, jnp.asarray([rows]))
    exact, _ = attend_cache(layer, q)

    def bf16(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    names: Any = CODES
    stored: list[LayerCache] = [
        from_tokens(bf16(keys), bf16(values), jnp.asarray([rows])),
        *(quantised(layer, name, less_mean=not whole) for name in names),
    ]
    outs = [attend_cache(rows, q)[0] for rows in stored]
    return [float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)) for out in outs]


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, between commas.")] = "4096,16384,65536",
    seed: Annotated[int, typer.Option(help="Of queries, keys and values.")] = 0,
    outliers: Annotated[bool, typer.Option("--outliers", help="Some columns of keys are 20 times as large.")] = False,
    offset: Annotated[float, typer.Option(help="Norm of what is added to all keys.")] = 0.0,
    whole: Annotated[bool, typer.Option("--whole", help="Store keys with their mean.")] = False,
) -> None:
    """Measure and print the table."""
    table = Table("rows", "bfloat16", *CODES, title="relative error of attention's output")
    for count in map(int, rows.split(",")):
        table.add_row(f"{count:,}", *(f"{error:.4f}" for error in errors(count, seed, outliers, offset, whole)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
