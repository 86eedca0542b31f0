"""How many rows a head may keep: one type for all methods."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from clusterkv_jax.runtime.errors import check_fields, is_count, is_number, is_one_of, shown

Base = Literal["prompt", "prompt+new"]
# All numbers or all tuples, as `Budget` checks; the library that reads presets takes one tuple type in a union.
Shares = Literal["pyramid"] | tuple[float | tuple[float, ...], ...] | None

# A budget that nothing reaches.
MOST_ROWS = 2**30
# Rows that are counted exactly, whatever they are then multiplied with; more of them are as many.
MANY_ROWS = 2**48
# Whoever writes so much means rows or per cent; a little more than everything is everything.
LEAST_NOT_A_SHARE = 2
# A pyramid falls from (2 - 1 / beta) to 1 / beta of the mean budget, as PyramidKV prints it.
PYRAMID_BETA = 20


@dataclass(frozen=True)
class Budget:
    """Rows kept per KV head, sinks, recent and window rows included.

    Exactly one of `ratio` (share of the base, B = int(ratio * base)), `tokens` (B itself) and `bytes` (keys, values and
    degrees of one prompt in all layers and heads; B is the most rows per head that fit).
    `base` is what the ratio is taken of: "prompt" (n), "prompt+new" (n + max new tokens), or None for what the method's
    paper uses: the prompt, and for Chelsea "prompt+new". A ratio of 1 never compresses, nor does one that is a little
    above; one of 2 or more is an error, since it looks like rows.

    `shares` spreads the rows unevenly, in proportion, so that B is the mean over all heads: one number per layer, or
    per layer one number for each of its KV heads, or "pyramid", which falls linearly over the layers. None is evenly.
    No share of a ratio is more than the whole base; what a head would have beyond it goes to the others. A method's
    protected rows are the least that a head gets; the others then get less, in proportion.
    """

    ratio: float | None = None
    tokens: int | None = None
    base: Base | None = None
    bytes: int | None = None
    shares: Shares = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.ratio, self.tokens, self.bytes)) != 1:
            raise ValueError(
                "Budget needs exactly one of ratio and tokens (or bytes), "
                f"got ratio={shown(self.ratio)}, tokens={shown(self.tokens)} and bytes={shown(self.bytes)}."
            )
        check_fields(
            self,
            ("ratio", self.ratio is None or (is_number(self.ratio) and self.ratio > 0), "a number above 0"),
            (
                "ratio",
                self.ratio is None or not is_number(self.ratio) or self.ratio < LEAST_NOT_A_SHARE,
                "a share, of which 1 is everything, since rows are tokens= (--cache-tokens)",
            ),
            ("tokens", self.tokens is None or is_count(self.tokens, 1), "a whole number of at least 1"),
            ("bytes", self.bytes is None or is_count(self.bytes, 1), "a whole number of at least 1"),
            ("base", is_one_of(self.base, None, "prompt", "prompt+new"), '"prompt", "prompt+new" or None'),
            ("shares", _are_shares(self.shares), '"pyramid", a tuple of numbers above 0 or of tuples of them, or None'),
        )


def rows_for(
    budget: Budget,
    lengths: np.ndarray | int,
    max_new_tokens: int,
    *,
    bytes_per_row: int = 0,
    layer: int = 0,
    head: int = 0,
    num_layers: int = 1,
    num_heads: int = 1,
    fewest: int = 0,
) -> np.ndarray:
    """B of each prompt length, as Python computes it: int(ratio * base) in double precision.

    `bytes_per_row` are those of one row in all layers and heads; layer and head matter where there are shares.
    `fewest` rows are the least share of a head, where the budget has so many on the average.
    """
    if budget.ratio is not None and budget.ratio >= 1:
        return np.full(np.shape(lengths), MOST_ROWS, np.int64)
    new = max_new_tokens if budget.base == "prompt+new" else 0
    base = np.asarray(lengths, np.int64) + new
    if budget.ratio is not None:
        rows = np.floor(budget.ratio * base.astype(np.float64))
    else:
        rows = np.full(base.shape, float(min(budget.tokens or _rows_in(budget.bytes or 0, bytes_per_row), MANY_ROWS)))
    if budget.shares is not None:
        table = share_table(budget, num_layers, num_heads)
        whole = np.zeros(table.shape, bool) if budget.ratio is None else table >= 1 / budget.ratio
        rest, of_rest = rows * table.size - base * whole.sum(), table / table[~whole].sum()
        low = (_floor(rest * of_rest.min()) < fewest) & (rows >= max(fewest, 1)) & (rows < base)
        own = base if whole[layer, head] else _floor(rest * of_rest[layer, head])
        if not np.any(low):
            return np.asarray(own, np.int64)
        factor = _factor(*(x.tobytes() for x in (rows, base, table)), fewest).reshape(base.shape)
        rows = np.where(low, _floor(np.clip(factor * table[layer, head], fewest, base)), own)
    return np.asarray(np.floor(rows), np.int64)


def _floor(rows: np.ndarray | np.float64) -> np.ndarray | np.float64:
    # Weights such as 0.1 / 0.3 are inexact: what is whole but for their rounding stays so.
    return np.floor(np.round(rows, 6))


@lru_cache(maxsize=8)
def _factor(rows: bytes, base: bytes, table: bytes, fewest: int) -> np.ndarray:
    """What shares are to be multiplied with so that the heads hold `rows` on the average, each at least `fewest` and at
    most `base`: by bisection, once for all layers and heads.
    """
    mean, most = np.frombuffer(rows), np.frombuffer(base, np.int64)
    shares, heads = np.unique(np.frombuffer(table), return_counts=True)
    low, high = np.zeros(most.shape), most / shares[0]
    for _ in range(48):
        middle = (low + high) / 2
        fits = np.clip(middle[:, None] * shares, fewest, most[:, None]) @ heads <= mean * heads.sum()
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low


def _rows_in(bytes_: int, bytes_per_row: int) -> int:
    if bytes_per_row < 1:
        raise ValueError(f"A budget of {bytes_} bytes needs the bytes of a row, at least 1, got {bytes_per_row}.")
    return bytes_ // bytes_per_row


@lru_cache(maxsize=64)  # a plan reads it for every head of every layer
def share_table(budget: Budget, num_layers: int, num_heads: int) -> np.ndarray:
    """Rows of each (layer, head) in units of their mean, f64 [L, K]; of a ratio none is more than its whole base.

    Raises:
        ValueError: if the shares are not those of this many layers and heads.
    """
    table = _relative(budget.shares, num_layers, num_heads)
    table = table if budget.ratio is None or budget.ratio >= 1 else _cut(table, 1 / budget.ratio)
    table.setflags(write=False)
    return table


def _cut(table: np.ndarray, most: float) -> np.ndarray:
    """The table with none above `most` > 1, and what that leaves spread over the others in proportion."""
    full = np.zeros(table.shape, bool)
    while True:
        rest = ~full
        scaled = np.where(full, most, table * ((table.size - most * full.sum()) / table[rest].sum()))
        if not (over := rest & (scaled >= most)).any():
            return scaled
        full |= over


def _relative(shares: Shares, num_layers: int, num_heads: int) -> np.ndarray:
    """The shares in units of their mean, f64 [L, K], as they were given."""
    if shares is None:
        return np.ones((num_layers, num_heads))
    if shares == "pyramid":
        falling = np.linspace(2 - 1 / PYRAMID_BETA, 1 / PYRAMID_BETA, num_layers) if num_layers > 1 else np.ones(1)
        return np.repeat(falling[:, None], num_heads, axis=1)
    per_layer = [row if isinstance(row, tuple) else (row,) * num_heads for row in shares]
    if len(per_layer) != num_layers or {len(row) for row in per_layer} != {num_heads}:
        raise ValueError(
            f"Budget shares must be {num_layers} numbers, one per layer, or {num_layers} tuples of {num_heads}, one "
            f"number per KV head, got {shares}."
        )
    table = np.asarray(per_layer, np.float64)
    return table / table.mean()


def _are_shares(shares: object) -> bool:
    if shares is None or shares == "pyramid":
        return True
    if not isinstance(shares, tuple) or not shares:
        return False
    rows = [row if isinstance(row, tuple) else (row,) for row in shares]
    alike = len({isinstance(row, tuple) for row in shares}) == 1
    return alike and all(row and all(is_number(x) and x > 0 for x in row) for row in rows)


def look_up(table: np.ndarray, index: Int[Array | np.ndarray, " B"]) -> Int[Array, "B ..."]:
    """Entries of a table made on the host in exact arithmetic: float32 on a device would round int(R*n) otherwise."""
    return jnp.asarray(table, jnp.int32)[index]
