"""A calibration as a picture: maps over layers and KV heads, and what the surrogate explains of each layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterkv_jax.auto_choice import AutoAt
from clusterkv_jax.evaluation.report.plots import new_panels
from clusterkv_jax.storage.files import replacing

RATIO = 1 / 8


def draw(measures: Any, file: Path) -> None:
    """The share of rows without a similar neighbour, outlier heads framed (Chelsea Figures 6, 7); where scores were
    measured also the rows of each head when an eighth of all is kept, and R^2 of the surrogate.
    """
    scored = measures.least_scores is not None
    layers, heads = np.shape(measures.outlier_share)
    panels = 3 if scored else 1
    figure, axes = new_panels(3.2 + 0.25 * heads, panels * (2.2 + 0.15 * layers), panels)
    _map(axes[0], 100 * np.asarray(measures.outlier_share), (0, 100), "viridis", "keys without a similar neighbour, %")
    for layer, head in measures.outlier_heads:
        axes[0].add_patch(_frame(head, layer))
    axes[0].set_title(measures.model, fontsize=9)
    if scored:
        rows = 100 * RATIO * np.asarray(measures.kept_shares(RATIO))
        _map(axes[1], np.minimum(rows, 100), (0, 100), "magma", "rows kept of all, %")
        axes[1].set_title("an eighth, by scores", fontsize=9)
        explained = np.asarray(measures.explained)
        for head in range(heads):
            axes[2].plot(explained[:, head], range(layers), "o", markersize=3, color="C0", alpha=0.6)
        axes[2].plot(explained.mean(axis=1), range(layers), color="C0")
        axes[2].set_xlim(min(0, float(explained.min())), 1)
        axes[2].invert_yaxis()
        axes[2].set_xlabel("$R^2$ of the surrogate")
        axes[2].set_ylabel("layer")
    _save(figure, file)


def draw_choices(choices: Sequence[AutoAt], file: Path) -> None:
    """Losses above the full cache over the share of the cache, a line for each method; the chosen ones are framed."""
    figure, axes = new_panels(4.5, 3.2 * 2, 2)
    shares = [100 * at.ratio for at in choices]
    for panel, name in zip(axes, ("continuing", "repeating"), strict=True):
        for method in choices[0].continuing:
            panel.plot(shares, [getattr(at, name)[method] for at in choices], "o-", markersize=4, label=method)
        taken = [getattr(at, name)[at.choice] for at in choices]
        panel.plot(shares, taken, "s", markersize=10, fillstyle="none", color="black", label="chosen")
        panel.set_xscale("log", base=2)
        panel.set_xticks(shares, [f"{share:g}" for share in shares])
        panel.set_xlabel("share of the cache, %")
        panel.set_ylabel(f"{name}: nats above full")
    axes[0].legend(fontsize=8)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})


def _map(axes: Any, numbers: np.ndarray, limits: tuple[float, float], colours: str, label: str) -> None:
    layers, heads = numbers.shape
    image = axes.imshow(numbers, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, heads, max(1, heads // 8)))
    axes.set_yticks(range(0, layers, max(1, layers // 8)))
    axes.figure.colorbar(image, ax=axes, label=label)


def _frame(x: int, y: int):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=1.5)
