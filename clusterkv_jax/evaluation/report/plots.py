"""What pictures drawn by matplotlib share: colours, empty figures, and SVG texts."""

import io
from typing import Any

from clusterkv_jax.evaluation.extras import library

# Okabe and Ito's colours, told apart by everybody, in an order that keeps neighbours distinct.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255", "#44AA99")


def new_figure(width: float, height: float):
    """An empty figure and its axes."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(width: float, height: float, count: int):
    """An empty figure and `count` axes, one below the other."""
    matplotlib = library("matplotlib", "Drawing a picture")
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a name may hold dollars
    figure = library("matplotlib.figure", "Drawing a picture").Figure(figsize=(width, height), layout="constrained")
    panels = [figure.add_subplot(count, 1, i + 1) for i in range(count)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, panels


def as_svg(figure: Any) -> str:
    """The picture as text, the same for the same numbers."""
    buffer = io.StringIO()
    context = library("matplotlib", "Drawing a picture").rc_context
    with context({"svg.hashsalt": "clusterkv", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
