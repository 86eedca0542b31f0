"""Which shapes of a layer of experts the programs of a launch share equally, and how."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.dispatch import device_kind, is_hopper, multiprocessors
from clusterkv_jax.kernels.splits import SPLITS

PROGRAMS, SLOTS = 128, 4  # and tiles of a program's ring
ROWS, COLUMNS = 256, 64  # of a tile of weights: inputs and outputs
IN_PLACE = jax.__version_info__ >= (0, 11)  # whose launches of Mosaic can say that they change an argument
# The counters: programs that are done with a step, and for each place among the best experts those done with its gate.
COMBINED, PROJECTED, ROUTED, GATED = range(4)


@dataclass(frozen=True)
class Plan:
    """Who makes what: numbers of a program, which is one of `PROGRAMS`. They divide without a rest.

    Attributes:
        kv_heads, splits, queries, dim: K, S, G, D of attention's parts.
        inputs, width: I and M of the output projection.
        experts, units: E and F.
        per_token: experts of a token.
    """

    kv_heads: int
    splits: int
    queries: int
    dim: int
    inputs: int
    width: int
    experts: int
    units: int
    per_token: int

    @classmethod
    def of(cls, parts: tuple[int, ...], projection: tuple[int, ...], gate: tuple[int, ...], per_token: int) -> "Plan":
        """By the shapes of attention's parts [K,S,G,D], of the output projection [I,M] and of gate [E,M,F]."""
        kv_heads, splits, queries, dim = parts
        inputs, width = projection
        return cls(kv_heads, splits, queries, dim, inputs, width, gate[0], gate[2], per_token)

    @property
    def columns(self) -> int:
        """Of a query head's output, that a program combines."""
        return self.inputs // PROGRAMS

    @property
    def parts(self) -> int:
        """Of the output projection's inputs; a program has a block of its outputs by one part."""
        return PROGRAMS * COLUMNS // self.width

    @property
    def each(self) -> int:
        """Programs of a chosen expert."""
        return PROGRAMS // self.per_token

    @property
    def shares(self) -> int:
        """Of the inputs of gate and up: as few as give all programs of an expert equally many blocks of units."""
        return self.each // math.gcd(self.each, self.units // COLUMNS)

    @property
    def project_tiles(self) -> int:
        """Of the output projection."""
        return self.inputs // self.parts // ROWS

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


# Plans whose launch has been run: Qwen3-30B-A3B's. Programs that wait for each other hang where one of them is wrong.
TRIED = (Plan(4, SPLITS, 8, 128, 4096, 2048, PROGRAMS, 768, 8),)


def unfit_device() -> str | None:
    """Why the kernel does not run on the device that is compiled for, or with this jax; None if it does."""
    if not is_hopper() or multiprocessors() < PROGRAMS:
        return f"needs a Hopper GPU of {PROGRAMS} multiprocessors, got {device_kind()} of {multiprocessors()}"
    return None if IN_PLACE else f"needs jax 0.11, got {jax.__version__}"


def refusal(
    parts: tuple[int, ...], projection: tuple[int, ...], gate: tuple[int, ...], per_token: int, *dtypes: Any
) -> str | None:
    """Why the kernel does not take these shapes and types on the device that is compiled for; None if it does."""
    if reason := unfit_device():
        return reason
    if others := [str(dtype) for dtype in dtypes if dtype != jnp.bfloat16]:
        return f"takes bfloat16, got {others[0]}"
    plan = Plan.of(parts, projection, gate, per_token)
    return None if plan in TRIED else f"has been run with {', '.join(map(str, TRIED))} alone, got {plan}"
