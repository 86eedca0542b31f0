"""A Flax nnx model in parts, and the functions of `models.decoder` over these parts."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from clusterkv_jax.blocks.attention_in import Projected
from clusterkv_jax.blocks.surrogate import token_scores
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.nnx.layouts import Layout


@dataclass(frozen=True, eq=False)
class Graph:
    """What a module is beside its arrays; a configuration inside it may not be hashable."""

    definition: Any

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.definition == other.definition

    @override
    def __hash__(self) -> int:
        return hash(len(self.definition.nodes))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """A module as arrays and the rest, which is static; `dtype` is that of the model's keys."""

    state: Any
    graph: Graph = field(metadata={"static": True})
    dtype: Any = field(default=None, metadata={"static": True})

    @property
    def module(self) -> Any:
        """The module, a new one at every call: what is changed of it is forgotten."""
        return nnx.merge(self.graph.definition, self.state)


def part_of(module: nnx.Module, dtype: Any = None) -> Part:
    """A module as a Part; its arrays are not copied."""
    definition, state = nnx.split(module)
    return Part(state, Graph(definition), dtype)


def in_parts(model: nnx.Module, layout: Layout, dtype: Any = None) -> Params:
    """The parameters of a model: `embed` is all of it but its layers, in whose places nothing stands."""
    copy = nnx.merge(*nnx.split(model))
    layers = list(attrgetter(layout.layers)(copy))
    _put_layers(copy, layout, nnx.List([_Place() for _ in layers]))
    return {
        "embed": part_of(copy, jnp.dtype(dtype) if dtype else None),
        "layers": tuple({"module": part_of(layer)} for layer in layers),
    }


def _put_layers(model: Any, layout: Layout, layers: Any) -> None:
    *owner, name = layout.layers.split(".")
    setattr(attrgetter(".".join(owner))(model) if owner else model, name, layers)


class _Reached(Exception):
    """A model has come to its first layer, with these hidden states."""

    def __init__(self, hidden: Array):
        super().__init__()
        self.hidden = hidden


class _Place(nnx.Module):
    """Where a layer was. It ends a run with the hidden states that come, or returns those that it is given."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaving = getattr(self, "leaving", None)
        if leaving is None:
            raise _Reached(args[0])
        return leaving


class _Attention:
    """In the place of a layer's attention: notes what enters and what is projected, or puts an output."""

    def __init__(self, layout: Layout, attention: Any, attended: Array | None = None):
        self.layout, self.attention, self.attended = layout, attention, attended
        self.entering: Any = None
        self.qkv: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attended = self.attended
        if attended is None:
            self.entering, self.qkv = args[0], self.layout.project(self.attention, *args, **kwargs)
            _check_heads(type(self.attention).__name__, self.entering, *self.qkv)
            attended = self.qkv[0]
        return self.layout.output(self.attention, attended)


@dataclass(frozen=True)
class FlaxDecoder:
    """The functions of `models.decoder`, for a model in parts.

    `returns` says what a layer returns: None, hidden states alone; (i, n), a tuple of n with the hidden states at i.
    """

    layout: Layout
    returns: tuple[int, int] | None = None

    def embed(self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """What the model hands its first layer."""
        try:
            self.layout.call(params["embed"].module, tokens, positions)
        except _Reached as reached:
            return reached.hidden
        raise ValueError(f"The model's call uses none of its {self.layout.layers!r}.")

    def attention_input(self, layer: Params, hidden: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """What enters a layer's attention."""
        return self.run(layer, hidden, _zeros(hidden))[1].entering

    def attention_in(
        self,
        layer: Params,
        hidden: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        surrogate: Params | None = None,
    ) -> Projected:
        """A layer's queries, keys and values, as its attention would use them, and what a surrogate says of them."""
        place = self.run(layer, hidden, positions)[1]
        return *place.qkv, None if surrogate is None else token_scores(surrogate, place.entering)

    def attention_out_and_mlp(
        self, layer: Params, hidden: Float[Array, "B T M"], attended: Float[Array, "B T H D"]
    ) -> Float[Array, "B T M"]:
        """The hidden states after a layer whose attention has this output."""
        result = self.run(layer, hidden, _zeros(hidden), attended)[0]
        return result if self.returns is None else result[self.returns[0]]

    def unembed(self, params: Params, hidden: Float[Array, "... M"]) -> Float[Array, "... V"]:
        """What the model makes of hidden states behind its last layer, float32."""
        rows = hidden.reshape(-1, 1, hidden.shape[-1])
        model = params["embed"].module
        for place in attrgetter(self.layout.layers)(model):
            place.leaving = rows if self.returns is None else _tuple(rows, *self.returns)
        logits = self.layout.call(model, _zeros(rows), _zeros(rows))
        return logits.astype(jnp.float32).reshape(*hidden.shape[:-1], -1)

    def run(
        self,
        layer: Params,
        hidden: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        attended: Float[Array, "B T H D"] | None = None,
    ) -> tuple[Any, _Attention]:
        """One run of a layer: what it returns, and what stood in the place of its attention."""
        module = layer["module"].module
        place = _Attention(self.layout, getattr(module, self.layout.attention), attended)
        setattr(module, self.layout.attention, place)
        return self.layout.layer(module, hidden, positions), place


def _check_heads(name: str, entering: Array, q: Array, k: Array, v: Array) -> None:
    """Raise ValueError for what is no projection of hidden states."""
    batch, tokens, _ = entering.shape
    for what, x in (("queries", q), ("keys", k), ("values", v)):
        if x.ndim != 4 or x.shape[:2] != (batch, tokens):
            raise ValueError(f"{name}: {what} must have the shape [{batch},{tokens},heads,D], got {x.shape}.")
    if k.shape != v.shape or q.shape[3] != k.shape[3]:
        raise ValueError(f"{name}: queries, keys and values {q.shape}, {k.shape}, {v.shape} must have one head size.")


def _zeros(hidden: Float[Array, "B T M"]) -> Int[Array, "B T"]:
    return jnp.zeros(hidden.shape[:2], jnp.int32)


def _tuple(hidden: Array, place: int, size: int) -> tuple[Any, ...]:
    return tuple(hidden if i == place else None for i in range(size))
