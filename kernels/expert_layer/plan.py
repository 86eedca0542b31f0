"""Which shapes of a layer of experts the programs of a launch share equally, and how."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.dispatch import device_kind, is_hopper, multiprocessors

PROGRAMS, SLOTS = 128, 4  # and tiles of a program's ring
ROWS, COLUMNS = 256, 64  # of a tile of weights: inputs and outputs
BLOCK = 64  # slots of a head that are read at once
LEAST, MOST = 128, 131072  # slots of a group of heads: a program has the biases of its span at once
IN_PLACE = jax.__version_info__ >= (0, 11)  # whose launches of Mosaic can say that they change an argument
# The counters: programs that are done with a step; for each KV head those that attended to it, and for each place among
# the best experts those done with its gate. The three kinds lie 128 bytes apart.
PROJECTED, ADDED, ROUTED = range(3)
ATTENDED, GATED = 32, 64


@dataclass(frozen=True)
class Plan:
    """Who makes what: numbers of a program, which is one of `PROGRAMS`. They divide without a rest.

    Attributes:
        kv_heads, queries, dim: K, G, D.
        width: M.
        experts, units: E and F.
        per_token: experts of a token.
    """

    kv_heads: int
    queries: int
    dim: int
    width: int
    experts: int
    units: int
    per_token: int

    @property
    def head_parts(self) -> int:
        """Of the inputs of the heads' projections; a program has one of them."""
        return self.width // ROWS

    @property
    def head_blocks(self) -> int:
        """Blocks of the heads' outputs, that a program makes by its part of the inputs."""
        return self.kv_heads * (self.queries + 2) * self.dim // COLUMNS * self.head_parts // PROGRAMS

    @property
    def splits(self) -> int:
        """Programs of a KV head: spans of its slots."""
        return PROGRAMS // self.kv_heads

    @property
    def parts(self) -> int:
        """Of the output projection's inputs: a block of D of all queries of a KV head."""
        return self.kv_heads * self.dim // COLUMNS

    @property
    def part_tiles(self) -> int:
        """Of a part, for one block of outputs."""
        return self.queries * COLUMNS // ROWS

    @property
    def project_blocks(self) -> int:
        """Blocks of the output projection's outputs, that a program makes by one part of its inputs."""
        return self.width // COLUMNS * self.parts // PROGRAMS

    @property
    def project_tiles(self) -> int:
        """Of the output projection."""
        return self.project_blocks * self.part_tiles

    @property
    def each(self) -> int:
        """Programs of a chosen expert."""
        return PROGRAMS // self.per_token

    @property
    def shares(self) -> int:
        """Of the inputs of gate and up: as few as give all programs of an expert equally many blocks of units."""
        return self.each // math.gcd(self.each, self.units // COLUMNS)

    @property
    def share_tiles(self) -> int:
        """Of gate, for one share of a block."""
        return self.width // self.shares // ROWS

    @property
    def gate_blocks(self) -> int:
        """Shares of blocks of units of a program."""
        return self.units // COLUMNS * self.shares // self.each

    @property
    def gate_tiles(self) -> int:
        """Of gate and up, one after the other."""
        return 2 * self.gate_blocks * self.share_tiles

    @property
    def down_blocks(self) -> int:
        """Blocks of outputs of a program."""
        return self.width // COLUMNS // self.each

    @property
    def down_tiles(self) -> int:
        """Of a block of outputs."""
        return self.units // ROWS

    def begin(self, split: Any, blocks: Any) -> Any:
        """The first of so many blocks of slots that a split has; behind the last split there is an empty one."""
        return jnp.minimum(blocks, jax.lax.div(split * blocks + (self.splits - 1), self.splits))

    def span(self, slots: int) -> int:
        """Most slots that a program reads of so many, a multiple of its threads."""
        blocks = _ceil(_ceil(slots, BLOCK), self.splits)
        return _ceil(blocks * BLOCK, 128) * 128


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


# Plans whose launch has been run: Qwen3-30B-A3B's. Programs that wait for each other hang where one of them is wrong.
TRIED = (Plan(4, 8, 128, 2048, PROGRAMS, 768, 8),)


def unfit_device() -> str | None:
    """Why the kernel does not run on the device that is compiled for, or with this jax; None if it does."""
    most = PROGRAMS + max(plan.kv_heads for plan in TRIED)
    if not is_hopper() or multiprocessors() < most:
        return f"needs a Hopper GPU of {most} multiprocessors, got {device_kind()} of {multiprocessors()}"
    return None if IN_PLACE else f"needs jax 0.11, got {jax.__version__}"


def refusal(plan: Plan, dtypes: Collection[Any], slots: Collection[int]) -> str | None:
    """Why the kernel does not take this plan, these types, or heads of so many slots; None if it does."""
    if reason := unfit_device():
        return reason
    if others := [str(dtype) for dtype in dtypes if dtype != jnp.bfloat16]:
        return f"takes bfloat16, got {others[0]}"
    if others := [count for count in slots if not LEAST <= count <= MOST]:
        return f"takes {LEAST} to {MOST} slots, got {others[0]}"
    return None if plan in TRIED else f"has been run with {', '.join(map(str, TRIED))} alone, got {plan}"
