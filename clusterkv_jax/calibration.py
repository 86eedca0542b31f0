"""What is measured once for a model and then given to methods: outlier heads, and how many rows each head needs.

Outlier heads are those whose keys have no similar neighbours and so lose most by clustering (Chelsea section 5.4).
Head shares say how unevenly a budget is spread, `Budget(shares=...)`, with the memory really saved: for methods that
choose rows by attention what AdaKV gives each head on average, for clustering methods more to heads that cluster badly.
All come from plain text, and are written as a small YAML file.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jaxtyping import Array, Float, Int

from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import groups
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.methods import AdaKV, Chelsea, Method
from clusterkv_jax.methods.base import Budgeted
from clusterkv_jax.methods.clustering import Clustering
from clusterkv_jax.models import transformer
from clusterkv_jax.models.causal_attention import causal_attention
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.transformer import Params
from clusterkv_jax.sharding import over_heads
from clusterkv_jax.tensors import compress

# Heads of equal shares stand together, so few different shares mean few arrays.
SHARE_STEP = 0.25
# What a head whose every key has a similar neighbour gets beside one without any, which gets 1 more.
CLUSTER_FLOOR = 0.1


def outlier_share(keys: Float[Array, "B K N D"], *, chunk: int = 256, threshold: float = 0.8) -> Float[Array, "B K"]:
    """Share of each head's A rows whose best cosine with a B row of their chunk is below `threshold`.

    An A row without any B row in its chunk counts as one without a similar neighbour. Outlier heads are those with the
    largest share.
    """

    def share(keys: Array) -> Array:
        _, score = chunked_matching(keys, chunk=chunk)
        return jnp.mean(score < threshold, axis=-1, dtype=jnp.float32)

    return over_heads(share, keys)


@dataclass(frozen=True)
class Calibration:
    """What a model's heads are like, [layer][KV head].

    Attributes:
        model: its name.
        outlier_share: mean over sequences of each head's `outlier_share`.
        outlier_heads: the pairs (layer, head) chosen for Chelsea.
        head_shares: rows of each head in units of its layer's mean, in steps of 0.25.
        settings: what it was measured with.
    """

    model: str
    outlier_share: tuple[tuple[float, ...], ...]
    outlier_heads: tuple[tuple[int, int], ...]
    head_shares: tuple[tuple[float, ...], ...]
    settings: Mapping[str, Any]

    @property
    def cluster_shares(self) -> tuple[tuple[float, ...], ...]:
        """Rows of each head for a clustering method, in units of the mean over all layers, in steps of 0.25: in
        proportion to CLUSTER_FLOOR + `outlier_share`.
        """
        wanted = CLUSTER_FLOOR + np.asarray(self.outlier_share)
        return _in_steps(wanted / wanted.mean())

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError if the model has other layers or heads than what was measured."""
        mine = (len(self.head_shares), len(self.head_shares[0]))
        if mine != (config.num_layers, config.num_kv_heads):
            raise ValueError(
                f"the calibration is of {self.model}, {mine[0]} layers of {mine[1]} KV heads; "
                f"this model has {config.num_layers} of {config.num_kv_heads}."
            )

    def applied(self, method: Method) -> Method:
        """The method with outlier heads where it has such, with the heads' shares of its budget otherwise: by how well
        they cluster for clustering methods, as AdaKV spreads rows for all others.

        Raises ValueError for a method that can take neither.
        """
        if isinstance(method, Chelsea):
            return dataclasses.replace(method, outlier_heads=self.outlier_heads)
        if not isinstance(method, Budgeted):
            raise ValueError(f"{type(method).__name__} has no budget, so a calibration has nothing to give it.")
        shares = self.cluster_shares if isinstance(method, Clustering) else self.head_shares
        return dataclasses.replace(method, budget=dataclasses.replace(method.budget, shares=shares))


def calibrate(
    model: Model,
    sequences: Sequence[Sequence[int]],
    *,
    outliers: float = 0.04,
    whole_layers: tuple[int, ...] = (),
    chunk: int = 256,
    threshold: float = 0.8,
    ratio: float = 0.25,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run the statistics over token sequences of equal length, one sequence and layer at a time.

    Args:
        model: from `load`.
        sequences: token ids, some thousand each.
        outliers: share of all heads that become outlier heads, those of `whole_layers` first.
        whole_layers: layers all of whose heads are outliers (Chelsea keeps Llama-2's layer 0).
        chunk, threshold: of the outlier statistic.
        ratio: the share of the cache that AdaKV spreads over a layer's heads.
        progress: called as progress(layers done, layers of all sequences).
    """
    config = model.config
    method = AdaKV(Budget(ratio=ratio))
    total = len(sequences) * config.num_layers
    shares, rows = (np.zeros((config.num_layers, config.num_kv_heads)) for _ in range(2))
    for i, tokens in enumerate(sequences):
        for number, layer in enumerate(observe_layers(model, tokens)):
            shares[number] += np.asarray(outlier_share(layer.keys, chunk=chunk, threshold=threshold)[0])
            kept = compress(method, layer.queries, layer.keys, layer.values)
            rows[number] += np.asarray(groups(kept)[0].length[0]) / int(ratio * len(tokens))
            if progress is not None:
                progress(i * config.num_layers + number + 1, total)
    shares, rows = shares / len(sequences), rows / len(sequences)
    return Calibration(
        model.name,
        _table(np.round(shares, 4)),
        choose_outliers(shares, outliers, whole_layers),
        _in_steps(rows),
        {
            "sequences": len(sequences),
            "tokens": len(sequences[0]),
            "chunk": chunk,
            "threshold": threshold,
            "outliers": outliers,
            "whole_layers": list(whole_layers),
            "ratio": ratio,
        },
    )


def choose_outliers(
    shares: Float[np.ndarray, "L K"], outliers: float, whole_layers: tuple[int, ...] = ()
) -> tuple[tuple[int, int], ...]:
    """round(outliers * L * K) heads: all of `whole_layers`, then those of the largest shares, of equal ones the first.

    Raises ValueError if a layer does not exist, or the whole layers alone are more heads than that.
    """
    layers, heads = shares.shape
    for layer in whole_layers:
        if not 0 <= layer < layers:
            raise ValueError(f"there is no layer {layer} to keep whole: the model has {layers}.")
    count = round(outliers * layers * heads)
    first = np.isin(np.arange(layers), whole_layers)[:, None]
    if first.sum() * heads > count:
        raise ValueError(
            f"the heads of {first.sum()} whole layers are {first.sum() * heads}, more than the {count} outlier heads "
            f"that {outliers:g} of {layers} x {heads} heads make."
        )
    order = np.argsort(-np.where(first, np.inf, shares), axis=None, kind="stable")[:count]
    return tuple(sorted((int(i) // heads, int(i) % heads) for i in order))


# --- one layer after the other ---


@dataclass(frozen=True)
class Observed:
    """One layer on one text: post-RoPE queries [1,H,N,D], keys and values [1,K,N,D].

    `ahead` are the queries that the layer makes of what the layer before it read; None in the first.
    """

    queries: Float[Array, "1 H N D"]
    keys: Float[Array, "1 K N D"]
    values: Float[Array, "1 K N D"]
    ahead: Float[Array, "1 H N D"] | None = None


def observe_layers(model: Model, tokens: Sequence[int]) -> Iterator[Observed]:
    """Queries, keys and values of every layer in turn."""
    ids = jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden = transformer.embed(model.params, model.config, ids, positions)
    before, ahead = hidden, None
    for number, weights in enumerate(model.params["layers"]):
        if number:
            ahead = jnp.swapaxes(_queries(weights, model.config, before, positions), 1, 2)
        before = hidden
        hidden, *qkv = _layer(weights, model.config, hidden, positions)
        queries, keys, values = (jnp.swapaxes(x, 1, 2) for x in qkv)
        yield Observed(queries, keys, values, ahead)


@partial(jax.jit, static_argnames=("config",))
def _layer(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    q, k, v = transformer.qkv(weights, config, hidden, positions)
    return transformer.finish(weights, config, hidden, causal_attention(q, k, v)), q, k, v


@partial(jax.jit, static_argnames=("config",))
def _queries(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    return transformer.qkv(weights, config, hidden, positions)[0]


# --- files ---


def to_yaml(calibration: Calibration) -> str:
    """The text of a calibration file, a line per layer."""
    content = dataclasses.asdict(calibration) | {"settings": dict(calibration.settings)}
    return yaml.safe_dump(_lists(content), sort_keys=False, default_flow_style=None, width=10**6)


def read(file: str | Path) -> Calibration:
    """Read what `to_yaml` wrote.

    Raises ValueError, naming the file and the key, if it is no such file.
    """
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"Calibration file {file} is not YAML text: {' '.join(str(error).split())}.") from error
    names = [f.name for f in dataclasses.fields(Calibration)]
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError(f"Calibration file {file} must hold exactly the keys {', '.join(names)}.")
    try:
        tables = {name: _table(np.asarray(content[name], np.float64)) for name in ("outlier_share", "head_shares")}
        heads = tuple((int(layer), int(head)) for layer, head in content["outlier_heads"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"Calibration file {file} is damaged: {error}.") from error
    return Calibration(str(content["model"]), outlier_heads=heads, settings=content["settings"], **tables)


def _in_steps(shares: Float[np.ndarray, "L K"]) -> tuple[tuple[float, ...], ...]:
    return _table(SHARE_STEP * np.maximum(np.rint(shares / SHARE_STEP), 1))


def _table(numbers: Float[np.ndarray, "L K"]) -> tuple[tuple[float, ...], ...]:
    if numbers.ndim != 2:
        raise ValueError(f"a number per layer and head was expected, got shape {numbers.shape}")
    return tuple(tuple(map(float, row)) for row in numbers)


def _lists(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, tuple | list) else tree
