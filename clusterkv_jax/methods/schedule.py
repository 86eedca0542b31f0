"""Which rows of a method always stay, and when a cache returns to its budget."""

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override


@dataclass(frozen=True)
class Protected:
    """Rows that are never dropped or merged: the first `sinks` and the last `recent` or `window`, by these names.

    A budget must leave `spare` rows beside them.
    """

    sinks: int | None = None
    recent: int | None = None
    window: int | None = None
    min_free: int = 1

    @property
    def first(self) -> int:
        """Rows at the start."""
        return self.sinks or 0

    @property
    def last(self) -> int:
        """Rows at the end."""
        return (self.recent or 0) + (self.window or 0)

    @property
    def fewest(self) -> int:
        """The fewest rows that a budget must leave."""
        return self.first + self.last + self.min_free

    @override
    def __str__(self) -> str:
        """As error messages name them: "sinks + recent = 16 + 64"."""
        named = {"sinks": self.sinks, "recent": self.recent, "window": self.window}
        counts = {name: count for name, count in named.items() if count is not None} or {"protected rows": 0}
        return f"{' + '.join(counts)} = {' + '.join(map(str, counts.values()))}"


@dataclass(frozen=True)
class Schedule:
    """When a group of heads returns to its budget B while decoding; `recompress_every` makes the usual one.

    Attributes:
        kind: "append": never. "interval": when it holds B + `interval` rows. "token": each token beyond B drops a row.
            "ring": each token beyond B takes the slot of another row.
        interval: rows beyond B.
        slack: a prompt of n tokens is compressed if n >= B + slack.
        rounding: rows beyond B that rounding may leave.
    """

    kind: Literal["append", "interval", "token", "ring"] = "append"
    interval: int = 0
    slack: int = 0
    rounding: int = 0


def recompress_every(interval: int | None, slack: int = 0, rounding: int = 0) -> Schedule:
    """Back to B at B + `interval` rows; None appends for ever."""
    if interval is None:
        return Schedule(slack=slack, rounding=rounding)
    return Schedule("interval", interval, slack, rounding)
