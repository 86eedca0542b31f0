"""Plans as a picture: memory of a chip over the context, of the full cache and of a method's."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from clusterkv_jax.evaluation.report.plots import COLOURS, new_figure
from clusterkv_jax.planning.arithmetic import memory
from clusterkv_jax.planning.plan_types import Measures
from clusterkv_jax.planning.topology import GIB, Topology
from clusterkv_jax.storage.files import replacing


def check(file: Path) -> None:
    """What would be noticed only after minutes: raises ValueError."""
    if file.suffix != ".png":
        raise ValueError(f"--plot must be a .png file, got {file}.")
    if not file.parent.is_dir():
        raise ValueError(f"The folder {file.parent} does not exist; make it before a picture is written there.")


def curve(measures: Measures, contexts: np.ndarray) -> list[float]:
    """GiB in use at most, by context."""
    return [memory(measures, context=context).total / GIB for context in contexts]


def draw(plans: Mapping[str, Measures], topology: Topology, file: Path) -> None:
    """A line for each plan, and what the chip has."""
    figure, axes = new_figure(7.0, 4.0)
    longest = next(iter(plans.values())).positions
    contexts = np.linspace(0, longest, 65)[1:]
    for (name, measures), colour in zip(plans.items(), COLOURS, strict=False):
        axes.plot(contexts / 1024, curve(measures, contexts), label=name, color=colour)
    axes.axhline(
        topology.chip.hbm / GIB, color="black", linestyle="--", linewidth=0.8, label=f"a chip of {topology.name}"
    )
    weights = next(iter(plans.values())).weights / GIB
    axes.axhline(weights, color="grey", linestyle=":", linewidth=0.8, label="weights")
    axes.set_xlim(0, longest / 1024)
    axes.set_ylim(0, None)
    axes.set_xlabel("context, thousands (1,024) of tokens")
    axes.set_ylabel("GiB in use on a chip")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
