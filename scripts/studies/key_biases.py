"""Needles found with rows in codes, by a model whose keys have a common offset as Qwen2's have.

The demo model gets key biases of a large norm in its first and last layer, in the two channels that rotate slowest, and
its queries no longer look there. So scores are those of the model without these channels, whatever the biases are, and
only what is stored differs. `--whole` stores keys with their mean, as it was before.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any
from unittest.mock import patch

import demo_chapter
import jax.numpy as jnp
import numpy as np
import typer
from needle_scores import score
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.cache import layers
from clusterkv_jax.methods import driver, heads_as_batch
from clusterkv_jax.presets import preset


def biased(model: ckv.Model, norm: float) -> ckv.Model:
    """The model with such biases; the other layers have biases of zero."""
    config, layers = replace(model.config, qkv_bias=True), list(model.params["layers"])
    half = config.head_dim // 2
    slowest = np.isin(np.arange(config.head_dim), (half - 1, 2 * half - 1))
    for number, layer in enumerate(layers):
        attention = layer["attention"]
        zeros = {f"{name}_bias": jnp.zeros(attention[name].shape[:2], attention[name].dtype) for name in "qkv"}
        if number in (0, config.num_layers - 1):
            zeros["k_bias"] += jnp.asarray(slowest * norm / 2**0.5, zeros["k_bias"].dtype)
            attention = attention | {"q": jnp.where(slowest[:, None], 0, attention["q"])}
        layers[number] = layer | {"attention": attention | zeros}
    return replace(model, config=config, params=model.params | {"layers": tuple(layers)})


def _quantised(layer: Any, name: Any, *, less_mean: bool, whole: bool) -> Any:
    return layers.quantised(layer, name, less_mean=less_mean and not whole)


def main(
    norms: Annotated[str, typer.Option(help="Of the biases, between commas.")] = "0,600",
    share: Annotated[float, typer.Option(help="Of the cache that auto keeps.")] = 0.125,
    cases: Annotated[int, typer.Option(help="Contexts; each is asked four questions.")] = 24,
    tokens: Annotated[int, typer.Option(help="Tokens of a context.")] = 3500,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    whole: Annotated[bool, typer.Option("--whole", help="Store keys with their mean.")] = False,
) -> None:
    """Measure and print the table."""
    decoder = ckv.load("demo", dtype=dtype)
    examples = demo_chapter.contexts(decoder.tokenizer, tokens, cases, seed=0)
    title = f"{cases * demo_chapter.NEEDLES.keys} questions"
    table = Table("norm of biases", "rows", "all of them", f"auto, {share:.1%}", title=title, box=MARKDOWN)
    replaced = partial(_quantised, whole=whole)
    with patch.object(driver, "quantised", replaced), patch.object(heads_as_batch, "quantised", replaced):
        for norm, name in product(map(float, norms.split(",")), (None, "int8", "int4")):
            methods = ckv.Full(cache_dtype=name), preset("auto", ckv.Budget(ratio=share), cache_dtype=name)
            found = [score(biased(decoder, norm), method, examples, f"{norm:g} {name}") for method in methods]
            table.add_row(f"{norm:g}", name or dtype, *(f"{value:.3f}" for value in found))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
