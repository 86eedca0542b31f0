"""How much of what matters a recall method finds: |I_T n I_true| / B by layer, head and step (ClusterKV figure 11).

The text is cut in two. Its first part is the prompt, which is indexed; every token of the second part is a step whose
true query, that of the model with its full cache, selects rows of the prompt. I_true are the B rows of the prompt with
the largest q . k. What is generated meanwhile, which all methods read, counts for nobody.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.evaluation.inspection.observations import Observed, seen_by
from clusterkv_jax.evaluation.inspection.page import by_layer
from clusterkv_jax.evaluation.report.plots import COLOURS, as_svg, new_figure
from clusterkv_jax.evaluation.templates import render
from clusterkv_jax.methods import Recall
from clusterkv_jax.runtime.programs import jit
from clusterkv_jax.tensors import build_index, select

Rates = Float[np.ndarray, "L H S"]


def recall_rates(layers: Sequence[Observed], method: Recall, steps: int) -> Rates:
    """The share of each step's B best rows that a method selects, NaN in layers that it leaves dense.

    Raises:
        ValueError: if the prompt, all but the last `steps` tokens, is not longer than the budget.
    """
    heads = layers[0].queries.shape[1]
    of_layers = np.full((len(layers), heads, steps), np.nan)
    for number, layer in enumerate(layers):
        if not method.is_dense(number):
            of_layers[number] = np.asarray(_layer_rates(layer, method, steps))
    return of_layers


def _layer_rates(layer: Observed, method: Recall, steps: int) -> Float[Array, "H S"]:
    cut = layer.keys.shape[2] - steps
    prompt = (x[:, :, :cut] for x in (layer.queries, layer.keys, layer.values))
    queries, keys, values = prompt
    index = build_index(method, keys, values, queries=queries)
    budget = int(index["budget"][0])
    if budget >= cut:
        raise ValueError(f"The recall rate needs a prompt longer than its budget, got {cut} tokens and {budget} rows.")
    lookups = seen_by(layer, method)
    return _rates(method, budget, index, layer.queries[:, :, cut:], lookups[:, :, cut:], keys)


@jit(static_argnames=("method", "budget"))
def _rates(method: Recall, budget: int, index, queries: Array, lookups: Array, keys: Array) -> Float[Array, "H S"]:
    kv_heads, tokens, dim = keys.shape[1:]

    def step(both):
        query, lookup = both  # [1, H, D]
        rows = select(method, index, lookup)[0]
        score = jnp.einsum("kgd,knd->kgn", query.reshape(kv_heads, -1, dim), keys[0], precision="highest")
        _, best = jax.lax.top_k(score.reshape(-1, tokens), budget)
        member = jax.vmap(lambda rows: jnp.zeros(tokens, bool).at[rows].set(True, mode="drop"))
        # -1 would name the last row.
        selection = member(jnp.where(rows < 0, tokens, rows))
        return jnp.sum(jnp.take_along_axis(selection, best, axis=1), axis=1) / budget

    return jax.lax.map(step, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(lookups, 2, 0))).T


def mean_rate(rates: Rates) -> float:
    """Over all heads and steps of the layers that recall."""
    return float(np.nanmean(rates))


def recall_page(model: Model, tokens: int, steps: int, by_entry: Mapping[tuple[str, int], Rates]) -> str:
    """Pictures of the rates of every (method, budget): over the budget, by layer, by head, over the steps."""
    most = max(budget for _, budget in by_entry)
    largest = {name: rates for (name, budget), rates in by_entry.items() if budget == most}
    return render(
        "inspection/recall_rates.html.jinja",
        title=f"{model.name}: recall rate",
        tokens=tokens - steps,
        steps=steps,
        most=most,
        over_budget=_over_budget(by_entry),
        by_layer=by_layer({name: rates.mean((1, 2)) for name, rates in largest.items()}, "recall rate"),
        by_head=_by_head(largest),
        over_steps=_over_steps(largest),
    )


def _over_budget(by_entry: Mapping[tuple[str, int], Rates]) -> str:
    figure, axes = new_figure(7.5, 3.6)
    for colour, name in zip(COLOURS, dict.fromkeys(name for name, _ in by_entry), strict=False):
        line = sorted((budget, mean_rate(rates)) for (other, budget), rates in by_entry.items() if other == name)
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4, label=name, color=colour)
    axes.set_xlabel("rows recalled")
    return _finished(figure, axes)


def _over_steps(by_name: Mapping[str, Rates]) -> str:
    figure, axes = new_figure(7.5, 3.2)
    for colour, (name, rates) in zip(COLOURS, by_name.items(), strict=False):
        axes.plot(1 + np.arange(rates.shape[2]), np.nanmean(rates, axis=(0, 1)), label=name, color=colour)
    axes.set_xlabel("step")
    return _finished(figure, axes)


def _finished(figure, axes) -> str:
    axes.set_ylabel("recall rate")
    axes.set_ylim(0, 1)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return as_svg(figure)


def _by_head(by_name: Mapping[str, Rates]) -> str:
    layers, heads, _ = next(iter(by_name.values())).shape
    figure, axes = new_figure((1.2 + 0.25 * heads) * len(by_name) + 0.8, 1.2 + 0.25 * layers)
    axes.remove()
    places = figure.subplots(1, len(by_name), squeeze=False)[0]
    for place, (name, rates) in zip(places, by_name.items(), strict=True):
        image = place.imshow(rates.mean(-1), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        place.set_title(name, fontsize=8)
    figure.colorbar(image, ax=places)
    return as_svg(figure)
