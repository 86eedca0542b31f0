"""What a benchmark asks: cells of a table, and the order in which they are timed.

A cell is a side (this library, or a peer), a method with its budget and type of stored rows, a prompt's length and a
batch. Cells of equal length and batch take turns, A B C A B C, so that what slows a machine down for a while slows all
of them.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from clusterkv_jax.kernels.quantised import CODES

OURS = "clusterkv"
# The libraries that a peer needs, by its name.
PEERS = {"transformers": ("torch",), "transformers-static": ("torch",), "kvpress": ("torch", "kvpress")}
MOST_TOKENS = 2**24
# What `--cache-dtype` calls rows that are stored as the model computes them.
AS_COMPUTED = "model"


@dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
        side: `OURS` or a name of `PEERS`.
        method: a preset, or what the peer calls its own.
        budget: a share of the cache or a number of rows; None keeps all.
        length: tokens of the prompt.
        batch: sequences that decode together.
        cache_dtype: how rows are stored; None as the model computes them.
    """

    side: str
    method: str
    budget: float | int | None
    length: int
    batch: int
    cache_dtype: str | None = None


@dataclass(frozen=True)
class GridRequest:
    """A whole benchmark; a run that was stopped goes on where another one asks the same.

    Attributes:
        model: "demo", a packaged shape, a folder or a hub id.
        entries: methods with their budgets.
        lengths: tokens of the prompts.
        batches: numbers of sequences.
        peers: names of `PEERS`.
        repeats: timings of each cell, beside the first one, which compiles.
        new_tokens: tokens generated in each timing.
        mesh: devices that share the model, such as "model=2".
        cache_dtypes: how rows of this library's methods are stored, each as in a `Cell`.
        requests: that come and go in an engine, instead of batches; a cell's batch is then its slots, and prompts have
            from the least to the most of `lengths`.
        settings: methods as preset files describe them, which may change between two runs.
        weights: how this library holds the weights, as `load` takes it.
    """

    model: str
    entries: tuple[tuple[str, float | int | None], ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    peers: tuple[str, ...]
    repeats: int
    new_tokens: int
    mesh: str | None
    cache_dtypes: tuple[str | None, ...] = (None,)
    requests: int = 0
    settings: tuple[str, ...] = ()
    weights: str | None = None


def parse_tokens(text: str) -> int:
    """A number of tokens: 4096, or 4k for 4,096 of them. Raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,8})(k?)", text.lower())
    tokens = int(found[1]) * (1024 if found[2] else 1) if found else 0
    if not 0 < tokens <= MOST_TOKENS:
        raise ValueError(f"--lengths takes numbers of tokens such as 4096 or 16k up to 16384k, got {text!r}.")
    return tokens


def parse_batch(text: str) -> int:
    """A number of sequences. Raises ValueError for anything else."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise ValueError(f"--batches takes whole numbers from 1 to 99999, got {text!r}.")
    return int(text)


def parse_dtypes(texts: Sequence[str]) -> tuple[str | None, ...]:
    """Types of stored rows; those of the model are None. Raises ValueError for one that is unknown or named twice."""
    known = AS_COMPUTED, *CODES
    for place, text in enumerate(texts):
        if text not in known or text in texts[:place]:
            raise ValueError(f"--cache-dtype takes each of {', '.join(known)} once, got {', '.join(texts)}.")
    if not texts:
        raise ValueError(f"--cache-dtype takes one or more of {', '.join(known)}, got none.")
    return tuple(None if text == AS_COMPUTED else text for text in texts)


def check_peers(names: Sequence[str]) -> None:
    """Raise ValueError for a peer that is unknown or named twice."""
    for place, name in enumerate(names):
        if name not in PEERS or name in names[:place]:
            raise ValueError(f"--peers takes each of {', '.join(PEERS)} once, got {', '.join(names)}.")


def cells(asked: GridRequest, sides: Sequence[str]) -> list[list[Cell]]:
    """Cells of these sides that take turns, the smaller caches first: memory's peak is then that of the last one."""
    lengths = (max(asked.lengths),) if asked.requests else asked.lengths
    groups = sorted(((n, b) for n in lengths for b in asked.batches), key=lambda group: group[0] * group[1])
    rows = {group: [cell for side in sides for cell in _of_side(asked, side, *group)] for group in groups}
    return [sorted(group, key=_size) for group in rows.values() if group]


def _of_side(asked: GridRequest, side: str, length: int, batch: int) -> Iterator[Cell]:
    if side == OURS:
        for method, budget in asked.entries:
            yield from (Cell(side, method, budget, length, batch, dtype) for dtype in asked.cache_dtypes)
    elif side == "kvpress":
        budgets = dict.fromkeys(budget for _, budget in asked.entries if budget is not None)
        yield from (Cell(side, "SnapKV", budget, length, batch) for budget in budgets)
    else:
        yield Cell(side, "full", None, length, batch)


def _size(cell: Cell) -> tuple[float, bool]:
    """What cells are sorted by: rows that a cache holds of a prompt, and whether they are stored whole."""
    share = 1.0 if cell.budget is None else cell.budget
    rows = float(share) if isinstance(share, int) else share * cell.length
    return rows, cell.cache_dtype is None


def turns(groups: Sequence[Sequence[Cell]], repeats: int, done: Collection[tuple[Cell, int]]) -> list[tuple[Cell, int]]:
    """What is to be timed, in order: the first call of each cell (repeat 0), then repeat after repeat.

    What is `done` is left out, except the first call of a cell that has others to come: it compiles.
    """
    order = []
    for group in groups:
        open_cells = [cell for cell in group if any((cell, n) not in done for n in range(repeats + 1))]
        order += [(cell, 0) for cell in open_cells]
        order += [(cell, n) for n in range(1, repeats + 1) for cell in open_cells if (cell, n) not in done]
    return order
