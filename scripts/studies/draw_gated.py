"""Draws what a prompt takes beside the weights while it is read, by its length: counted, no model is run.

    python scripts/studies/draw_gated.py docs/results/gated-memory.svg

Read whole, there are hidden states of all tokens and, of one layer, all keys and values; with a gate rows, window and
chunk of all layers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.report.plots import COLOURS, new_figure
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import reading_bytes
from clusterkv_jax.methods.plan import plans_of_width
from clusterkv_jax.methods.request import row_bytes
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.presets import preset
from clusterkv_jax.storage.files import replacing

GIB, RESERVE = 2**30, 128


def gated(config: ModelConfig, budget: ckv.Budget, tokens: int) -> float:
    """GiB of all layers with a window of 4,096 and chunks of 2,048 tokens."""
    method, sizes = (
        preset("kvzap", budget),
        {"reserve": RESERVE, "step_tokens": 1, "max_new_tokens": RESERVE, "whole": 0},
    )
    _, plan = plans_of_width(config, method, jnp.bfloat16, tokens, **sizes)
    return reading_bytes(config, jnp.bfloat16, method, tuple(map(plan, range(config.num_layers))), Gate()) / GIB


def whole(config: ModelConfig, share: float, tokens: int) -> float:
    """GiB of hidden states, of a layer's rows, and of what is kept of all layers."""
    of_layer = config.num_kv_heads * row_bytes(config.head_dim, jnp.bfloat16, jnp.bfloat16)
    kept = config.num_layers * share + (1 if share < 1 else 0)
    return tokens * (2 * config.hidden_size + of_layer * kept) / GIB


def main(
    file: Annotated[Path, typer.Argument(help="An .svg to write.")],
    model: Annotated[str, typer.Option(help="Packaged shapes.")] = "llama-3.1-8b",
    longest: Annotated[int, typer.Option(help="Tokens.")] = 2**20,
    rows: Annotated[int, typer.Option(help="Of the budget that no text makes larger.")] = 16384,
) -> None:
    """Draw four lines."""
    config = replace(model_config(model), max_positions=longest)
    lengths = np.linspace(longest // 16, longest, 16).astype(int)
    lines = {
        "the full cache": lambda tokens: whole(config, 1.0, tokens),
        "an eighth, compressed afterwards": lambda tokens: whole(config, 0.125, tokens),
        "an eighth, gated": lambda tokens: gated(config, ckv.Budget(ratio=0.125), tokens),
        f"{rows:,} rows, gated": lambda tokens: gated(config, ckv.Budget(tokens=rows), tokens),
    }
    figure, axes = new_figure(7.0, 4.0)
    for (name, memory), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(lengths / 1024, [memory(int(tokens)) for tokens in lengths], label=name, color=colour)
    axes.set_xlim(0, longest / 1024)
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens read, thousands (1,024)")
    axes.set_ylabel("GiB beside the weights")
    axes.legend(frameon=False, fontsize=8)
    with replacing(file) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
