"""What a program copies into its ring, one tile after the other, until it knows its expert."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import div, rem

from clusterkv_jax.kernels.expert_layer.plan import BLOCK, COLUMNS, PROGRAMS, ROWS, Plan
from clusterkv_jax.kernels.expert_layer.tiles import slot_of


class Rings(NamedTuple):
    """A program's tiles, the same memory each: of weights [ROWS, COLUMNS], the same for inputs that are not in a row
    [ROWS / COLUMNS, COLUMNS, COLUMNS], of heads' weights [COLUMNS, ROWS], of keys and values as they are copied
    [2, BLOCK, D], and as they are read [2, D / COLUMNS, BLOCK, COLUMNS].
    """

    weights: Any
    apart: Any
    heads: Any
    copied: Any
    rows: Any


@dataclass(frozen=True)
class Here:
    """What a program has at hand.

    Attributes:
        number: of the program.
        held: what its KV head holds; None before that is known.
        weights: of the layer, in memory.
        out, counters: what programs make for each other, and the steps that they count, in memory.
        rings: its tiles.
        inputs: of its products, for the token or the queries.
        arrived, both: barriers of tiles that are one copy, and of those that are two.
    """

    plan: Plan
    number: Any
    held: Any
    weights: Any
    out: Any
    counters: Any
    rings: Rings
    inputs: Any
    arrived: Any
    both: Any

    @property
    def heads(self) -> tuple[Any, Any]:
        """The part of the inputs of the heads' products, and the first block of their outputs."""
        return rem(self.number, self.plan.head_parts), div(self.number, self.plan.head_parts) * self.plan.head_blocks

    @property
    def before(self) -> Any:
        """Tiles of the ring before those of the output projection."""
        return self.plan.head_blocks + self.held.count

    @property
    def part(self) -> tuple[Any, Any]:
        """Of the output projection's inputs: a KV head, and a block of D."""
        part, blocks = div(self.number, PROGRAMS // self.plan.parts), self.plan.dim // COLUMNS
        return div(part, blocks), rem(part, blocks)

    def outputs(self, i: Any) -> Any:
        """Of the output projection, block i of the program's."""
        plan = self.plan
        block = rem(self.number, PROGRAMS // plan.parts) * plan.project_blocks + i
        return pl.ds(block * COLUMNS, COLUMNS)

    def projection(self, t: Any) -> tuple[Any, Any, Any]:
        """Tile t of the output projection [K G, D, M]: its blocks of outputs come in turns."""
        plan, several = self.plan, ROWS // COLUMNS
        kv_head, block = self.part
        queries = pl.ds(kv_head * plan.queries + div(t, plan.project_blocks) * several, several)
        return queries, pl.ds(block * COLUMNS, COLUMNS), self.outputs(rem(t, plan.project_blocks))


def feed_heads(here: Here, t: Any) -> None:
    """Begin to copy tile t of the heads' weights, none behind the last."""
    plan, slot, begin = here.plan, slot_of(t), 0
    part, first = here.heads
    block, columns = first + t, pl.ds(part * ROWS, ROWS)
    for weights in (here.weights.q, here.weights.k, here.weights.v):
        end = begin + weights.shape[0] // COLUMNS
        source = weights.at[pl.ds((block - begin) * COLUMNS, COLUMNS), columns]
        copy = partial(plgpu.copy_gmem_to_smem, source, here.rings.heads.at[slot], here.arrived.at[slot])
        pl.when((t < plan.head_blocks) & (block >= begin) & (block < end))(copy)
        begin = end


def feed_rows(here: Here, i: Any) -> None:
    """Begin to copy block i of the span's keys and values, none behind the last."""
    held = here.held

    def copy(place: Any, keys: Any, values: Any, *_: Any) -> None:
        slot, rows = slot_of(here.plan.head_blocks + i), pl.ds((held.first + i) * BLOCK, BLOCK)
        for j, x in enumerate((keys, values)):
            plgpu.copy_gmem_to_smem(x.at[0, place, rows], here.rings.copied.at[slot, j], here.both.at[slot])

    pl.when(i < held.count)(lambda: held.of_group(copy))


def feed_projection(here: Here, t: Any) -> None:
    """Begin to copy tile t of the output projection."""
    slot = slot_of(here.before + t)
    source = here.weights.projection.at[here.projection(t)]
    plgpu.copy_gmem_to_smem(source, here.rings.apart.at[slot], here.arrived.at[slot])
