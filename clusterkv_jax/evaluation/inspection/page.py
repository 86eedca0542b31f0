"""`clusterkv inspect`: the observations of `inspection` as one page of pictures."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.evaluation.inspection import observations
from clusterkv_jax.evaluation.inspection.observations import Observed
from clusterkv_jax.evaluation.report.plots import COLOURS, as_svg, new_figure
from clusterkv_jax.evaluation.templates import render
from clusterkv_jax.methods import Full, Method

MOST_MAPS = 8  # layers, and heads, of the cosine maps


def page_of(model: Model, tokens: Sequence[int], methods: Mapping[str, Method]) -> str:
    """The page of a model, a text and methods; the full cache among them is left out, it keeps everything.

    Methods that recall keep everything too, so that there are no kept positions of theirs to compare.
    """
    layers = observations.observe(model, tokens)
    less = {name: method for name, method in methods.items() if method != Full()}
    curves = [observations.similarity_over_distance(layer) for layer in layers]
    convex = np.mean([observations.convex_share(curve) for curve in curves])
    likeness = {
        name: observations.neighbour_similarity(observations.kept_positions(layers, method))
        for name, method in less.items()
        if method.forgets
    }
    errors = {name: observations.output_errors(layers, method) for name, method in less.items()}
    return render(
        "inspection/page.html.jinja",
        title=f"{model.name}: keys and caches",
        model=model.name,
        tokens=len(tokens),
        convex=convex,
        maps=_maps(layers),
        curves=_curves(curves),
        outliers=_outliers(observations.outlier_map(layers)),
        likeness=likeness and by_layer(likeness, "similarity to the next layer"),
        errors=[
            by_layer({name: error[:, i] for name, error in errors.items()}, what)
            for i, what in enumerate(("cosine", "relative L1 error"))
            if errors
        ],
    )


def _even(count: int) -> list[int]:
    """At most eight numbers below `count`, evenly spread."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MOST_MAPS))})


def _maps(layers: Sequence[Observed]) -> str:
    rows, heads = _even(len(layers)), _even(layers[0].keys.shape[1])
    figure, axes = new_figure(1.5 * len(heads) + 0.8, 1.5 * len(rows))
    axes.remove()
    grid = figure.subplots(len(rows), len(heads), squeeze=False)
    for line, number in zip(grid, rows, strict=True):
        maps = observations.cosine_maps(layers[number])
        for place, head in zip(line, heads, strict=True):
            image = place.imshow(maps[head], vmin=-1, vmax=1, cmap="RdBu_r")
            place.set_xticks([])
            place.set_yticks([])
            place.set_title(f"layer {number}, head {head}", fontsize=7)
    figure.colorbar(image, ax=grid, shrink=0.6)
    return as_svg(figure)


def _curves(curves: Sequence[Float[np.ndarray, "K S"]]) -> str:
    figure, axes = new_figure(7.5, 4)
    for colour, number in zip(COLOURS, _even(len(curves)), strict=False):
        mean = curves[number].mean(0)
        axes.plot(1 + np.arange(len(mean)), mean, label=f"layer {number}", color=colour)
    axes.set_xlabel("tokens apart")
    axes.set_ylabel("mean cosine of keys")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return as_svg(figure)


def _outliers(shares: Float[np.ndarray, "L K"]) -> str:
    layers, heads = shares.shape
    figure, axes = new_figure(2.2 + 0.35 * heads, 1.2 + 0.25 * layers)
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(heads))
    figure.colorbar(image, ax=axes)
    return as_svg(figure)


def by_layer(values: Mapping[str, Float[np.ndarray, " L"]], what: str) -> str:
    """A line per name over the layers."""
    figure, axes = new_figure(7.5, 3.2)
    for i, (name, line) in enumerate(values.items()):
        axes.plot(range(len(line)), line, marker="o", markersize=3, label=name, color=COLOURS[i % len(COLOURS)])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel(what)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return as_svg(figure)
