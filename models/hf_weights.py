"""How parameters lie in checkpoint files: a family's table of names, turned into one entry per parameter.

A table maps a parameter's path (`layers.*.mlp.up`) to the name of its tensor (`model.layers.*.mlp.up_proj.weight`);
`*` is the layer, and `{expert}` each of its experts, whose tensors make up a stack. Parameters that name the same
tensor lie in it one below the other, in the table's order, which is all there is to fused projections. A table may
name more than a configuration has (biases, QK norms).

`name[{expert}]` is a tensor of all experts, each one's matrix with its inputs first; parameters that name the same have
their outputs one behind the other. Of `name[{expert}, 1::2]` a parameter has every second output, from 1 on.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import LINEAR_INPUTS, abstract

# Files hold the matrix of a linear layer as [outputs, inputs]. Ours of LINEAR_INPUTS begin with the inputs; q, k and v
# are [heads, head_dim, inputs] and lie as in the file.
_AS_IN_FILE = ("q", "k", "v")
_OF_EXPERT = re.compile(r"(.*)\[(\d+)(?:, (\d+)::(\d+))?\]")


@dataclass(frozen=True)
class Stored:
    """A parameter of shape `shape` as rows `start`, `start + step` ... of the tensor `name`; `rows` is their shape.

    With an `expert` they are those of its part of the tensor, which has them as columns.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    start: int
    linear: bool
    expert: int | None = None
    step: int = 1

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter as a view of the whole stored tensor: nothing is copied."""
        of_expert = tensor if self.expert is None else tensor[self.expert].T
        part = of_expert[self.start : self.start + self.rows[0] * self.step : self.step]
        return (part.T if self.linear else part).reshape(self.shape)

    def numbers(self, rows: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Of these rows of the parameter the numbers in the file, those of one expert behind those of another."""
        return (self.expert or 0) * self.rows[0] * self.step + self.start + self.step * rows

    def rows_of(self, parameter: np.ndarray) -> np.ndarray:
        """The inverse of `view`: a parameter in the file's orientation."""
        return parameter.reshape(self.rows[::-1]).T if self.linear else parameter.reshape(self.rows)


@dataclass(frozen=True)
class StoredStack:
    """A parameter whose first dimension counts tensors of their own: the experts of a layer."""

    parts: tuple[Stored, ...]


def layout(config: ModelConfig, table: Mapping[str, str]) -> dict[str, Any]:
    """A pytree like `abstract(config)` with a Stored or a StoredStack in every place."""
    shapes = {_path(path): spec.shape for path, spec in jax.tree.leaves_with_path(abstract(config))}
    places: dict[str, Stored | StoredStack] = {}
    counts: Counter[str] = Counter()
    for pattern, name in table.items():
        for layer in map(str, range(config.num_layers) if "*" in pattern else [0]):
            path = pattern.replace("*", layer)
            if path in shapes:
                places[path] = _place(path, name.replace("*", layer), shapes[path], counts)
    return jax.tree.map_with_path(lambda path, _: places[_path(path)], abstract(config))


def file_shapes(stored: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this layout holds."""
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in jax.tree.leaves(stored):
        if isinstance(leaf, StoredStack) and leaf.parts[0].expert is not None:
            first = leaf.parts[0]
            before = shapes.get(first.name, (0,))[-1] if first.step == 1 else 0
            shapes[first.name] = (len(leaf.parts), *first.rows[:0:-1], before + first.rows[0] * first.step)
    for leaf in parts(stored):
        if leaf.expert is not None:
            continue
        before = shapes.get(leaf.name, (0,))[0]
        shapes[leaf.name] = (before + leaf.rows[0], *leaf.rows[1:])
    return shapes


def parts(stored: dict[str, Any]) -> list[Stored]:
    """Every tensor's place of a layout, those of stacks too."""
    leaves = jax.tree.leaves(stored)
    return [part for leaf in leaves for part in (leaf.parts if isinstance(leaf, StoredStack) else (leaf,))]


def _place(path: str, name: str, shape: tuple[int, ...], counts: Counter[str]) -> Stored | StoredStack:
    if "{expert}" in name:
        names = (name.replace("{expert}", str(number)) for number in range(shape[0]))
        return StoredStack(tuple(_tensor(path, one, shape[1:], counts) for one in names))
    return _tensor(path, name, shape, counts)


def _tensor(path: str, name: str, shape: tuple[int, ...], counts: Counter[str]) -> Stored:
    leaf = path.rpartition(".")[2]
    if leaf in LINEAR_INPUTS:
        inputs = LINEAR_INPUTS[leaf]
        rows = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    elif leaf in _AS_IN_FILE:
        rows = (math.prod(shape[:-1]), shape[-1])
    else:
        rows = (math.prod(shape),) if leaf.endswith(("_bias", "_norm")) else shape
    if found := _OF_EXPERT.fullmatch(name):
        stack, expert, start, step = found.groups()
        start = counts[name] if start is None else int(start)
        counts[name] += rows[0]
        return Stored(stack, shape, rows, start, leaf in LINEAR_INPUTS, int(expert), int(step or 1))
    start = counts[name]
    counts[name] += rows[0]
    return Stored(name, shape, rows, start, leaf in LINEAR_INPUTS)


def _path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
