"""What is trained: the parameters of a model of ours, or the arrays of a Flax nnx model, which keeps its own layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.kernels.weight_codes import dequantised, is_coded
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.runtime.extras import library


@dataclass(frozen=True)
class Trainee:
    """Weights, and how the decoder takes them.

    Attributes:
        model: whose configuration, tokenizer and name count; its parameters are those before training.
        weights: a pytree of float32 arrays, which the optimizer changes.
        params_of: the decoder's parameters from such weights, under jit.
    """

    model: Model
    weights: Any
    params_of: Callable[[Any], Params]


def of_model(model: Model, compute_dtype: str = "float32") -> Trainee:
    """All parameters of a model of ours but a calibration's surrogate, which stays as it is.

    The weights are kept in float32, those of a model in codes as the numbers that these stand for; with a
    `compute_dtype` of 16 bits the model computes in that.
    """
    layers = model.params["layers"]
    surrogates = tuple({name: x for name, x in layer.items() if name == "surrogate"} for layer in layers)
    plain = tuple({name: x for name, x in layer.items() if name != "surrogate"} for layer in layers)

    def params_of(weights: Params) -> Params:
        cast = jax.tree.map(lambda x: x.astype(compute_dtype), weights)
        pairs = zip(cast["layers"], surrogates, strict=True)
        return {**cast, "layers": tuple({**layer, **surrogate} for layer, surrogate in pairs)}

    # A copy: a training step donates its weights, and the model's own are somebody else's.
    own = {**model.params, "layers": plain}
    weights = jax.tree.map(lambda x: jnp.array(dequantised(x), jnp.float32), own, is_leaf=is_coded)
    return Trainee(model, weights, params_of)


def of_flax(compressed: Any) -> Trainee:
    """The arrays (`nnx.Param`) of the model that `clusterkv_jax.nnx.compressed` was given; it computes as it says.

    Put trained ones back with `put_back`.
    """
    nnx = library("flax.nnx", "Training a Flax model", "flax")
    from clusterkv_jax.nnx.decoder import in_parts

    definition, params, rest = nnx.split(compressed.model, nnx.Param, ...)
    names, leaves, tree = _named(params)
    config = compressed.config

    def params_of(weights: dict[str, Any]) -> Params:
        state = jax.tree.unflatten(tree, [weights[name] for name in names])
        return in_parts(nnx.merge(definition, state, rest), config.decoder.layout, config.dtype)

    weights = {name: jnp.array(leaf) for name, leaf in zip(names, leaves, strict=True)}
    return Trainee(compressed.as_model(), weights, params_of)


def put_back(compressed: Any, weights: dict[str, Any]) -> None:
    """Give the Flax model the weights that `of_flax` named and a run has trained."""
    nnx = library("flax.nnx", "Training a Flax model", "flax")
    names, _, tree = _named(nnx.state(compressed.model, nnx.Param))
    nnx.update(compressed.model, jax.tree.unflatten(tree, [weights[name] for name in names]))


def _named(state: Any) -> tuple[list[str], list[Any], Any]:
    """The arrays of an nnx state with their names, such as `layers.0.attn.q.kernel`."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in pairs]
    return names, [leaf for _, leaf in pairs], tree
