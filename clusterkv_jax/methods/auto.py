"""Auto: the method that a model's calibration chose (docs/methods/orbitkv.md, docs/results/pretrained.md)."""

from dataclasses import dataclass, fields, replace
from typing import Any

from clusterkv_jax.auto_choice import AutoChoice
from clusterkv_jax.calibration import Calibration
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.kvzap import KVzap
from clusterkv_jax.methods.orbitkv import OrbitKV

# Recent rows where the others merge, and their part of the mean budget where they are dropped. On a pretrained model 32
# lose less of plain text than 8, and what a head is asked from near by grows with the prompt.
RECENT, RECENT_SHARE = 32, 1 / 16
# Exponent of the degree where centroids of many unlike rows must not outweigh what is looked up.
TEMPERED = 0.5


@dataclass(frozen=True)
class Auto(OrbitKV):
    """What to take where nothing speaks for another method: it becomes that of the model's calibration.

    `presets.completed` puts the method in its place that was measured to lose least with such a budget, as `generate`
    and engines do: OrbitKV with these fields, the same with a `degree_power` of at most 0.5, or KVzap, which has no
    `merged`. Unless `recent` says another number, the second has 32 recent rows and the third a `recent_share` of 1/16.
    Without a calibration it is OrbitKV.

    Attributes:
        budget: rows per KV head on the average, sinks and recent rows included.
        sinks: first rows, which always stay.
        recent: last rows, which always stay.
        merged: OrbitKV's share of centroids.
        interval: generated tokens between two compressions.
        degree_power: a centroid of n rows counts as n to this power: 1 is the log degree of the papers, 0 one row.
    """

    def chosen(self, choice: AutoChoice | None) -> Method:
        """The method of a calibration's choice; None is one that nobody measured."""
        mine = {field.name: getattr(self, field.name) for field in fields(OrbitKV)}
        if choice == "orbitkv":
            return OrbitKV(**mine)
        usual = self.recent == OrbitKV.recent
        if choice == "orbitkv-half":
            recent = self._room_of_recent() if usual else self.recent
            return OrbitKV(**mine | {"recent": recent, "degree_power": min(self.degree_power, TEMPERED)})
        shared = {name: mine[name] for name in ("budget", "sinks", "recent", "cache_dtype")}
        return KVzap(**shared, recent_share=RECENT_SHARE if usual else 0.0, decode_interval=self.interval)

    def _room_of_recent(self) -> int:
        """Recent rows of tempered merging: fewer than usual where a budget of tokens has no room for them."""
        room = RECENT if self.budget.tokens is None else self.budget.tokens - self.sinks - self.protected.min_free
        return max(self.recent, min(RECENT, room))


def settled(method: Any, calibration: Calibration) -> Any:
    """The method with what a calibration chose in place of `Auto`, also where it is a part of another."""
    if hasattr(method, "chosen"):
        return method.chosen(calibration.auto_at(method.budget))
    parts = {
        name: settled(getattr(method, name), calibration) for name in ("method", "prefill") if hasattr(method, name)
    }
    return replace(method, **parts) if parts else method
