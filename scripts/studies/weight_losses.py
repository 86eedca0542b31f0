"""What weights in codes cost: the loss on a text above that of the numbers, in nats a token.

A file that has codes of a kind keeps them under that name. Convert it first to see its numbers rounded:

    clusterkv convert smollm2 numbers --dtype float32
    python scripts/studies/weight_losses.py numbers --text wiki.test.raw --data books/
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints.activation_aware import codes_by_text
from clusterkv_jax.checkpoints.loading import open_checkpoint, parameter_name
from clusterkv_jax.cli.calibrate import read_texts
from clusterkv_jax.cli.convert import PIECES, TOKENS, begun
from clusterkv_jax.kernels.weight_codes import dequantised, is_coded
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.text.tokenizer import encode


def losses(model: Any, params: Any, rows: np.ndarray) -> np.ndarray:
    """Mean loss of each row of tokens, whose numbers are those that codes stand for."""

    @jax.jit
    def loss(params: Any, row: Any) -> Any:
        logits = jax.nn.log_softmax(forward(params, model.config, row[None])[0, :-1])
        return -jnp.mean(jnp.take_along_axis(logits, row[1:, None], axis=-1))

    numbers = jax.tree.map(lambda x: jnp.asarray(dequantised(x)), params, is_leaf=is_coded)
    return np.array([loss(numbers, row) for row in jnp.asarray(rows)])


def by_text(model: Any, name: str, data: str, sizes: tuple[int, int]) -> Any:
    """The parameters with int4 codes as `clusterkv convert --data` makes them, by so many pieces of so many tokens."""
    checkpoint, (pieces, tokens) = open_checkpoint(name), sizes
    codes = codes_by_text(checkpoint, begun(model.tokenizer, read_texts(data), tokens, pieces), lambda *_: None)

    def place(path: tuple[Any, ...], x: Any) -> Any:
        return jax.tree.map(jnp.asarray, codes.get(parameter_name(path), x))

    return jax.tree.map_with_path(place, model.params)


def main(
    model: Annotated[str, typer.Argument(help="As load takes it.")],
    text: Annotated[Path, typer.Option(help="What losses are of.")],
    data: Annotated[str | None, typer.Option(help="What int4 is rounded by.", show_default="none")] = None,
    rows: Annotated[int, typer.Option(help="Of 512 tokens.", min=2)] = 16,
    pieces: Annotated[int, typer.Option(help="Of the data.", min=1)] = PIECES,
    tokens: Annotated[int, typer.Option(help="Of a piece.", min=2)] = TOKENS,
) -> None:
    """Measure and print the table."""
    plain = ckv.load(model, weights="dequantised", dtype="float32")
    ids = encode(plain.tokenizer, text.read_text(encoding="utf-8")[: rows * 6000])
    # Each begins as a text does, for models that have a token for that.
    begin = encode(plain.tokenizer, "", add_special_tokens=True)[:1]
    size = 512 - len(begin)
    read = np.array([begin + ids[i * size : (i + 1) * size] for i in range(rows)])
    exact = losses(plain, plain.params, read)
    table = Table("weights", "nats above the numbers", title=f"{model}: {exact.mean():.4f} on {rows} rows")
    for kind in ("int8", "int4", *(["int4 by text"] if data else [])):
        found = ckv.load(model, weights=kind, dtype="float32").params if kind in ("int8", "int4") else None
        params = by_text(plain, model, data or "", (pieces, tokens)) if found is None else found
        above = losses(plain, params, read) - exact
        table.add_row(kind, f"{above.mean():+.4f} ± {above.std() / len(above) ** 0.5:.4f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
