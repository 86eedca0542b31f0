"""The numbers that are measured of a model, and what methods get of them: outlier heads, and shares of a budget."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from msgspec import Meta

from clusterkv_jax.auto_choice import AutoAt, AutoChoice
from clusterkv_jax.budget import Budget
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.errors import is_count
from clusterkv_jax.runtime.sharding import over_heads

# Heads of equal shares stand together, so few different shares mean few arrays.
SHARE_STEP = 0.25
# Parts of a head's rows whose least score is measured: everything, then fewer by the square root of 2 each.
PARTS = tuple(2.0 ** (-i / 2) for i in range(17))
# Shares from scores are powers of the fourth root of 2, and no less than this of the mean.
LEAST_SHARE = 1 / 16
# The least part of a head's rows that counts as all of them.
NEARLY_WHOLE = 0.9
# The weight of a head whose keys all have a similar neighbour. A head without any such key weighs 1 more.
CLUSTER_FLOOR = 0.1

# Arrays of a layer's surrogate, in the order in which they are applied.
SURROGATES = {"linear": ("weights", "bias"), "mlp": ("inner_weights", "inner_bias", "weights", "bias")}
# What a file may hold: a part of a head's rows, the number of a layer or head, rows in units of a mean.
RowPart = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[int, Meta(ge=0, le=2**20)]
RowCount = Annotated[float, Meta(gt=0, le=2**20)]
Log = Annotated[float, Meta(ge=-(2**10), le=2**10)]
Explained = Annotated[float, Meta(ge=-(2**20), le=1)]
AnyMethod = TypeVar("AnyMethod", bound=Any)


def with_shares(calibration: "Calibration | None", method: AnyMethod) -> AnyMethod:
    """A method that goes by learned scores, with the shares that were measured with them if its budget names none.

    Of a pair of methods both get the shares, since no head may have fewer rows for decoding than for the prompt.
    """
    if hasattr(method, "method"):
        return dataclasses.replace(method, method=with_shares(calibration, method.method))
    if hasattr(method, "prefill"):
        first, then = with_shares(calibration, method.prefill), method.decode
        if first != method.prefill and hasattr(then, "budget") and then.budget.shares is None:
            then = dataclasses.replace(then, budget=dataclasses.replace(then.budget, shares=first.budget.shares))
        return dataclasses.replace(method, prefill=first, decode=then)
    learns = bool({"scores", "repetition"} & method.inputs(0))
    if calibration is None or not learns or method.budget.shares is not None:
        return method
    return calibration.applied(method)


@partial(jax.jit, static_argnames=("chunk", "threshold"))
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
    """What a model's heads are like, `[layer][KV head]`, of the layers that see every token.

    Attributes:
        model: its name.
        outlier_share: mean over sequences of each head's `outlier_share`.
        outlier_heads: the pairs (layer, head) chosen for Chelsea.
        head_shares: rows of each head in units of its layer's mean, in steps of 0.25.
        settings: what it was measured with.
        least_scores: logarithm of the least score that the surrogate expects among the best `PARTS` of a head's rows.
        explained: share of these logarithms' variance that the surrogate explains, R^2.
        surrogate: for each layer the arrays that `learned.surrogates.predicted_scores` takes; no part of a YAML file.
        auto: what the method `Auto` becomes: of several shares of the cache, or one name for all; None where nobody
            measured which loses less.
    """

    model: str
    outlier_share: tuple[tuple[RowPart, ...], ...]
    outlier_heads: tuple[tuple[Number, Number], ...]
    head_shares: tuple[tuple[RowCount, ...], ...]
    settings: Mapping[str, Any]
    least_scores: tuple[tuple[tuple[Log, ...], ...], ...] | None = None
    explained: tuple[tuple[Explained, ...], ...] | None = None
    surrogate: Any = field(default=None, compare=False, repr=False)
    auto: AutoChoice | Annotated[tuple[AutoAt, ...], Meta(min_length=1)] | None = None

    def auto_at(self, budget: Budget) -> AutoChoice | None:
        """What the method `Auto` becomes with a budget: the choice for the share whose ratio to it is nearest to 1, of
        two the smaller. A budget of tokens is a share of a text as long as those measured.

        Raises ValueError for a budget of bytes, where choices differ.
        """
        if not isinstance(self.auto, tuple):
            return self.auto
        share = self._ratio(budget)
        return min(self.auto, key=lambda at: (abs(float(np.log(at.ratio / share))), at.ratio)).choice

    def kept_shares(self, ratio: float) -> tuple[tuple[float, ...], ...]:
        """Rows of each head, in units of the mean over all layers, if the best `ratio` of all rows are kept.

        They come in steps, and a head that would lose less than a tenth keeps everything.

        Raises ValueError where no scores were measured, or for a ratio below what was.
        """
        if self.least_scores is None:
            raise ValueError(f"The calibration of {self.model} holds no scores; measure it again for shares from them.")
        if not PARTS[-1] <= ratio <= 1:
            raise ValueError(
                f"The calibration of {self.model} has shares of {PARTS[-1]:.2%} to 100%, not of {ratio:.2%}."
            )
        scores = np.asarray(self.least_scores, np.float64)
        low, high = float(scores.min()), float(scores.max())
        for _ in range(64):  # the score that `ratio` of all rows exceed
            middle = (low + high) / 2
            low, high = (middle, high) if _kept(scores, middle).mean() > ratio else (low, middle)
        parts = _kept(scores, low)
        shares = 2 ** (np.rint(4 * np.log2(np.maximum(parts / ratio, LEAST_SHARE))) / 4)
        whole = parts >= NEARLY_WHOLE
        rest = shares.size - whole.sum() / ratio
        if 0 < rest < shares.size:
            shares = np.where(whole, 1 / ratio, shares * rest / shares[~whole].sum())
        return as_table(shares)

    @property
    def cluster_shares(self) -> tuple[tuple[float, ...], ...]:
        """Rows of each head for a clustering method, in units of the mean over all layers, in steps of 0.25: in
        proportion to CLUSTER_FLOOR + `outlier_share`.
        """
        shares = CLUSTER_FLOOR + np.asarray(self.outlier_share)
        return in_steps(shares / shares.mean())

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError if the model has other layers or heads than what was measured."""
        mine = (len(self.head_shares), len(self.head_shares[0]))
        layers = len(config.global_layers)
        if mine != (layers, config.num_kv_heads):
            raise ValueError(
                f"The calibration is of {self.model}, {mine[0]} layers of {mine[1]} KV heads; "
                f"this model has {layers} of {config.num_kv_heads}."
            )
        widths = {next(iter(layer.values())).shape[0] for layer in self.surrogate or ()}
        if widths - {config.hidden_size}:
            raise ValueError(
                f"The surrogate is of {self.model}, which is {min(widths)} wide; this model is {config.hidden_size}."
            )

    def applied(self, method: Any) -> Any:
        """The method with outlier heads where it has such, with the heads' shares of its budget otherwise: by their
        scores where those were measured; else by how well they cluster for clustering methods, as AdaKV spreads rows
        for all others.

        Raises ValueError for a method that can take neither, and for a budget whose shares were not measured.
        """
        if hasattr(method, "outlier_heads"):
            return dataclasses.replace(method, outlier_heads=self.outlier_heads)
        if not hasattr(method, "budget"):
            raise ValueError(f"{type(method).__name__} has no budget, so a calibration has nothing to give it.")
        shares = self.cluster_shares if method.storage == "centroids" else self.head_shares
        if self.least_scores is not None and (ratio := self._ratio(method.budget)) < 1:
            shares = self.kept_shares(ratio)
        if method.storage == "pages":  # within a layer each prompt spreads its rows itself
            shares = tuple(float(np.mean(row)) for row in shares)
        return dataclasses.replace(method, budget=dataclasses.replace(method.budget, shares=shares))

    def _ratio(self, budget: Budget) -> float:
        """The share of a text as long as those measured."""
        if budget.bytes is not None:
            raise ValueError("Shares from scores need a budget of a ratio or of tokens, got bytes.")
        if budget.ratio is not None:
            return budget.ratio
        tokens: Any = self.settings.get("tokens")
        if not is_count(tokens, 1):
            raise ValueError(
                f"The calibration of {self.model} does not say of how many tokens its texts are, got {tokens!r}; "
                "a budget of tokens needs that."
            )
        return min(1.0, (budget.tokens or 1) / int(tokens))


def least_scores(scores: Float[np.ndarray, "L K R"]) -> Float[np.ndarray, "L K parts"]:
    """`Calibration.least_scores` of the logarithms of the scores of any number of rows."""
    return np.stack([np.quantile(scores, 1 - part, axis=-1) for part in PARTS], axis=-1)


def _kept(scores: Float[np.ndarray, "L K parts"], threshold: float) -> Float[np.ndarray, "L K"]:
    """The part of each head's rows that exceed a score, between the parts that were measured by its logarithm."""
    logs = np.log(PARTS)
    return np.exp([[np.interp(threshold, head, logs) for head in layer] for layer in scores])


def choose_outliers(
    shares: Float[np.ndarray, "L K"], outliers: float, whole_layers: tuple[int, ...] = ()
) -> tuple[tuple[int, int], ...]:
    """round(outliers * L * K) heads: all of `whole_layers`, then those of the largest shares, of equal ones the first.

    Raises ValueError if a layer does not exist, or the whole layers alone are more heads than that.
    """
    layers, heads = shares.shape
    for layer in whole_layers:
        if not 0 <= layer < layers:
            raise ValueError(f"There is no layer {layer} to keep whole: the model has {layers}.")
    count = round(outliers * layers * heads)
    first = np.isin(np.arange(layers), whole_layers)[:, None]
    if first.sum() * heads > count:
        raise ValueError(
            f"The heads of {first.sum()} whole layers are {first.sum() * heads}, more than the {count} outlier heads "
            f"that {outliers:g} of {layers} x {heads} heads make."
        )
    order = np.argsort(-np.where(first, np.inf, shares), axis=None, kind="stable")[:count]
    return tuple(sorted((int(i) // heads, int(i) % heads) for i in order))


def in_steps(shares: Float[np.ndarray, "L K"]) -> tuple[tuple[float, ...], ...]:
    """Shares rounded to steps of `SHARE_STEP`, at least one step each."""
    return as_table(SHARE_STEP * np.maximum(np.rint(shares / SHARE_STEP), 1))


def as_table(numbers: Float[np.ndarray, "L K"]) -> tuple[tuple[float, ...], ...]:
    """Numbers by layer and head as nested tuples. Raises ValueError for any other shape."""
    if numbers.ndim != 2:
        raise ValueError(f"A number per layer and head was expected, got shape {numbers.shape}.")
    return tuple(tuple(map(float, row)) for row in numbers)
