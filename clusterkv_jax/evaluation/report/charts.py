"""Lines over an axis as SVG texts, drawn by a template: no library of pictures is needed, and both themes have colours.

A chart is small enough for a telephone and grows with the page. Its lines are named below it, in the page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterkv_jax.evaluation.templates import render

COLOURS = 10  # of page.html.jinja
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 20, 10, 38
_APART = 38  # between two ticks of the horizontal axis, at least


@dataclass(frozen=True)
class CurvePoint:
    """A place on a line, where its interval ends, and what it is called."""

    x: float
    y: float
    low: float
    high: float
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """Points from left to right; `colour` is a number below `COLOURS`, and a dashed line has none."""

    name: str
    points: tuple[CurvePoint, ...]
    colour: int | None


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, by logarithms or not, with ticks and their texts."""

    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def draw(lines: Sequence[Curve], across: Axis, up: Axis) -> str:
    """The chart, read aloud as its axes' names; values beyond an axis lie on its end."""

    def x(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * across.place(value), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.place(value), 1)

    drawn = [
        {
            "colour": line.colour,
            "name": line.name,
            "points": [(x(p.x), y(p.y), y(p.low), y(p.high), p.title) for p in line.points],
        }
        for line in lines
    ]
    return render(
        "report/chart.svg.jinja",
        lines=drawn,
        across=[(x(value), text) for value, text in _readable(across, x)],
        up=[(y(value), text) for value, text in up.ticks],
        names=(across.name, up.name),
        box={"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": _WIDTH - _RIGHT, "bottom": _HEIGHT - _BOTTOM},
    )


def _readable(axis: Axis, x) -> list[tuple[float, str]]:
    """The ticks, from the right, that do not touch each other."""
    kept: list[tuple[float, str]] = []
    for value, text in sorted(axis.ticks, reverse=True):
        if not kept or x(kept[-1][0]) - x(value) >= _APART:
            kept.append((value, text))
    return kept
