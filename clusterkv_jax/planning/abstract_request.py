"""A request of prompts to a model that is not there: described arrays on a mesh, and the programs that prefill calls.

`prefill` itself is traced, so that the programs are those that it would call, and their arguments those that they would
get; nothing is computed.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.cache.kinds import is_part
from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.checkpoints.in_codes import code_shapes, kind_of
from clusterkv_jax.decoding import SEGMENT, DecodeState, decode_loop, prefill
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.driver import shards_slots
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params, abstract
from clusterkv_jax.runtime.prng import seed_key
from clusterkv_jax.runtime.sharding import CACHE_AXES, HEAD_AXES, param_shardings, partition
from clusterkv_jax.sampling import Sampling

WHOLE = PartitionSpec()
HIDDEN = ("batch", "tokens", None)


def array(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE
) -> jax.ShapeDtypeStruct:
    """An array on the mesh, by default whole on every device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def parameters(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    dtype: Any,
    *,
    learned: bool = False,
    weights: str | None = None,
) -> Params:
    """A model's parameters as `load` lays them out; with a linear surrogate of scores in each layer if `learned`.

    Products are in codes where `weights` is "int8" or "int4".
    """
    specs = abstract(config)

    def place(path, spec, sharding):
        coded = code_shapes(spec, path[-1].key, kind_of(path[-1].key, weights), mesh)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding) if coded is None else coded

    params = jax.tree.map_with_path(place, specs, param_shardings(specs, mesh))
    if not learned:
        return params
    shapes = {"weights": (config.hidden_size, config.num_kv_heads), "bias": (config.num_kv_heads,)}
    surrogate = {name: array(mesh, shape, jnp.float32) for name, shape in shapes.items()}

    def learns(number):
        return {"surrogate": surrogate} if number in config.global_layers else {}

    return params | {"layers": tuple(layer | learns(number) for number, layer in enumerate(params["layers"]))}


def chip_bytes(tree: Any) -> int:
    """Bytes of a tree of described arrays that each device holds."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def placed(tree: Any, method: Method, mesh: Any, hidden: tuple[int, ...] = ()) -> Any:
    """Results of prefill as its programs constrain them: hidden states, of this shape, and arrays of caches."""

    def place(path: tuple[Any, ...], part: Any) -> Any:
        axes = CACHE_AXES if shards_slots(method, part, path) else HEAD_AXES
        return jax.tree.map(lambda x: put(x, axes[x.ndim]), part)

    def put(x: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        axes = HIDDEN if x.shape == hidden else axes
        return array(mesh, x.shape, x.dtype, partition(axes, x.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_part)


@dataclass(frozen=True)
class ProgramCall:
    """A program with its arguments, and its described results."""

    program: Any
    args: tuple[Any, ...]
    out: Any
    lowered: Any


@dataclass(frozen=True, eq=False)
class ProgramJob:
    """Prompts of `context` tokens each, and up to `new_tokens` that follow them; compressed while they are read, if
    there is a `gate`.
    """

    config: ModelConfig
    method: Method
    mesh: Mesh
    batch: int
    context: int
    new_tokens: int
    gate: Gate | None = None
    weights: str | None = None

    @cached_property
    def params(self) -> Params:
        """Described parameters in the published type, those of layers in codes where there are `weights`."""
        return self.params_on(self.mesh)

    def params_on(self, mesh: Mesh | AbstractMesh) -> Params:
        """The same on another mesh."""
        learned, dtype = "scores" in self.method.inputs(0), jnp.dtype(self.config.dtype)
        return parameters(self.config, mesh, dtype, learned=learned, weights=self.weights)

    @property
    def cache(self) -> KVCache:
        """The cache after prefill, as it is laid out."""
        return self._traced[0]

    @property
    def calls(self) -> tuple[ProgramCall, ...]:
        """The programs that prefill calls, in their order; equal calls are the same object."""
        return self._traced[1]

    @property
    def reading_bytes(self) -> int:
        """Bytes of a chip's part of the caches while prompts are read with a gate; 0 without."""
        return self._traced[2]

    @cached_property
    def _traced(self) -> tuple[KVCache, tuple[ProgramCall, ...], int]:
        known: dict[Any, ProgramCall] = {}
        calls, caches, held = [], [], [0]

        def run(program: Any, *args: Any) -> Any:
            args = jax.tree.map(self._described, args)
            leaves, tree = jax.tree.flatten(args)
            key = program, tree, *((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
            if key not in known:
                lowered = program.lower(*args)
                known[key] = ProgramCall(
                    program, args, placed(lowered.out_info, self.method, self.mesh, self.hidden.shape), lowered
                )
            calls.append(known[key])
            return known[key].out

        def read(key: Any, tokens: Any) -> int:
            lengths = np.full(self.batch, self.context, np.int32)
            sizes: Any = {"max_new_tokens": self.new_tokens, "key": key, "call": run}
            args = self.params, self.config, self.method
            if self.gate is None:
                caches.append(prefill(*args, tokens, lengths, **sizes)[0])
            else:
                ids = np.zeros(tokens.shape, np.int32)
                sizes |= {"gate": self.gate, "on_chunk": lambda _, cache: held.append(chip_bytes(cache))}
                caches.append(gated_prefill(*args, ids, lengths, **sizes)[0])
            return 0

        tokens = jax.ShapeDtypeStruct((self.batch, self.context), jnp.int32)
        with jax.set_mesh(self.mesh):
            jax.eval_shape(read, jax.eval_shape(lambda: seed_key(0)), tokens)
        return caches[0], tuple(calls), max(held)

    def decode(self, layers: int) -> Any:
        """The decode program of the first `layers` layers, lowered."""
        params = {**self.params, "layers": self.params["layers"][:layers]}
        cache = replace(self.cache, layers=self.cache.layers[:layers], state=self.cache.state[:layers])
        whole: Any = partial(array, self.mesh)
        state = DecodeState(cache, whole((self.batch,), jnp.int32), whole((self.batch,), jnp.bool_))
        key = jax.eval_shape(lambda: seed_key(0))
        numbers = whole(key.shape, key.dtype), whole((), jnp.int32), whole((), jnp.int32)
        fixed: Any = {"sampling": Sampling(), "eos_ids": self.config.eos_ids, "steps": SEGMENT}
        with jax.set_mesh(self.mesh):
            return vars(decode_loop)["lower"](params, self._first(layers), self.method, state, *numbers, **fixed)

    def _first(self, layers: int) -> ModelConfig:
        """The configuration of a model of the first layers."""
        names = ("sliding_layers", "unrotated_layers")
        kinds = {name: tuple(layer for layer in getattr(self.config, name) if layer < layers) for name in names}
        return replace(self.config, num_layers=layers, **kinds)

    def _described(self, x: Any) -> Any:
        known = not hasattr(x, "shape") or isinstance(x, jax.ShapeDtypeStruct)
        return x if known else array(self.mesh, x.shape, x.dtype)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Hidden states of the prompts, or of the tokens that are read whole before a gate."""
        tokens = self.context if self.gate is None else min(self.context, self.gate.window)
        shape = (self.batch, tokens, self.config.hidden_size)
        return array(self.mesh, shape, number_dtype(self.params), partition(HIDDEN, shape, self.mesh))
