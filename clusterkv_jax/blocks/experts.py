"""Experts of a layer: a router chooses few of them for every token, and a token goes through these alone.

A row is a token on its way through one expert. Each backend multiplies rows with the weights of their experts, which
stay where they are:

    tpu    ragged: rows sorted by expert, for an instruction that elsewhere multiplies every row with every expert
    gpu    gathered: few rows, each with the weights or codes of its expert, which are read as a part of the product
    xla    in blocks of rows of one expert; weights in codes too
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.config import ClampedSwiglu, Experts
from clusterkv_jax.blocks.gpu import MOST, check_numbers
from clusterkv_jax.blocks.linear import linear, ragged_linear
from clusterkv_jax.blocks.quantised_linear import partitions
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.quantised_linear import quantised_experts
from clusterkv_jax.kernels.weight_codes import is_coded
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch
from clusterkv_jax.runtime.sharding import ambient_mesh, partition

Weights = dict[str, Any]
Gated = Callable[[Array, Array], Array]
# Rows that are multiplied with the weights of their expert at once.
_FEWEST, _MOST = 8, 128
# Logical axes of the experts' weights: all devices share every expert, whichever are chosen.
AXES = {
    "router": ("experts", "model"),
    "gate": ("experts", "model", "mlp"),
    "up": ("experts", "model", "mlp"),
    "down": ("experts", "mlp", "model"),
    "router_bias": ("experts",),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", "model"),
    "choice_bias": ("experts",),
}
# What a row meets at its expert; the rest is of all experts together.
_OF_ROWS = ("gate", "up", "down", "gate_bias", "up_bias")


def mixture(
    weights: Weights,
    experts: Experts,
    activation: Callable[[Array], Array],
    x: Float[Array, "B T M"],
    *,
    logits: Float[Array, "B T E"] | None = None,
) -> Float[Array, "B T M"]:
    """The outputs of each token's experts, added up by the router's shares.

    `logits` are the products of x with the router, where they are there already.
    """
    biases = weights.get("router_bias"), weights.get("choice_bias")
    chosen, shares = route(weights["router"], experts, x, *biases, logits=logits)
    if experts.scales_inputs:
        x, shares = x * shares.astype(x.dtype), jnp.ones_like(shares)
    run = partial(_of_tokens, partial(_gated, experts.clamp, activation))
    own = {name: weights[name] for name in _OF_ROWS if name in weights}
    mesh = ambient_mesh()
    if mesh is None:
        return _with_down_bias(run(x, chosen, shares, own), weights, chosen, shares)
    tokens = partition(("batch", "tokens", None), x.shape, mesh)
    places, split = _places(own, mesh)

    def part(*operands: Any) -> Array:
        # Each device sorts its own tokens, and has its own hidden units of every expert.
        out = run(*operands)
        return jax.lax.psum(out, split) if split else out

    specs = (tokens, tokens, tokens, places)
    over_mesh = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return _with_down_bias(over_mesh(x, chosen, shares, own), weights, chosen, shares)


def _places(weights: Weights, mesh: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Where the weights lie on the mesh, and the axes of it that share the hidden units of each expert."""
    places: dict[str, Any] = {
        name: partitions(own, mesh) if is_coded(own) else partition(AXES[name], own.shape, mesh)
        for name, own in weights.items()
    }
    hidden = {(place.codes if is_coded(place) else place)[AXES[name].index("mlp")] for name, place in places.items()}
    if len(hidden) == 1:
        return places, tuple(jax.tree.leaves(hidden.pop()))
    # Groups of inputs that so many devices cannot share equally.
    return jax.tree.map(lambda _: PartitionSpec(), places), ()


def route(
    router: Float[Array, "E M"],
    experts: Experts,
    x: Float[Array, "B T M"],
    bias: Float[Array, " E"] | None = None,
    choice_bias: Float[Array, " E"] | None = None,
    *,
    logits: Float[Array, "B T E"] | None = None,
) -> tuple[Int[Array, "B T per_token"], Float[Array, "B T per_token"]]:
    """Each token's experts, the best first, and their shares: float32 probabilities among all E experts, or scores."""
    if logits is None:
        logits = linear(x, router, (1,), dtype=jnp.float32 if experts.sigmoid else None)
    logits = (logits if bias is None else logits + bias[None, None]).astype(jnp.float32)
    if experts.sigmoid:
        scores = jax.nn.sigmoid(logits)
        ranked = scores if choice_bias is None else scores + choice_bias[None, None].astype(scores.dtype)
        _, chosen = _best(ranked, experts.per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
    elif experts.normalize:  # among those that are chosen, so that all others need no exponentials
        best, chosen = _best(logits, experts.per_token)
        return chosen, experts.scale * jax.nn.softmax(best, axis=-1)
    else:
        shares, chosen = _best(jax.nn.softmax(logits, axis=-1), experts.per_token)
    if experts.normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares if experts.scale == 1 else experts.scale * shares


def _best(
    scores: Float[Array, "B T E"], count: int
) -> tuple[Float[Array, "B T per_token"], Int[Array, "B T per_token"]]:
    """The greatest of each token's scores and their experts, of equal ones the first."""
    best, chosen = dispatch("best_experts", {"gpu": _by_rank, "xla": jax.lax.top_k}, None, scores, count)
    return best, chosen


def _by_rank(scores: Array, count: int) -> tuple[Array, Array]:
    """Each score compared with all others. On a GPU that is two launches of few tokens, where a sort takes four."""
    if scores.shape[0] * scores.shape[1] > MOST:
        raise LeftToXLA(f"Scores of few tokens are compared with each other, got {scores.shape}.")
    number = ordinals(scores.shape[-1], 4)
    one, others = scores[..., :, None], scores[..., None, :]
    ahead = (others > one) | ((others == one) & (number < jnp.swapaxes(number, 2, 3)))
    places = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    chosen = places[..., None, :] == jnp.swapaxes(ordinals(count, 4), 2, 3)
    best = jnp.max(jnp.where(chosen, others, -jnp.inf), axis=-1)
    # The greatest, so that it is an expert's number whatever the scores are.
    return best, jnp.max(jnp.where(chosen, number, 0), axis=-1)


def _gated(clamp: ClampedSwiglu | None, activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """What a row's products with `gate` and `up` become before `down`."""
    if clamp is None:
        return activation(gate) * up
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.gain * gate)


def _with_down_bias(
    out: Float[Array, "B T M"],
    weights: Weights,
    chosen: Int[Array, "B T per_token"],
    shares: Float[Array, "B T per_token"],
) -> Float[Array, "B T M"]:
    """With the biases of the outputs too: of a token all at once, so that devices which share hidden units add them
    but once.
    """
    if "down_bias" not in weights:
        return out
    bias = weights["down_bias"].astype(jnp.float32)
    by_expert = jnp.sum(jax.nn.one_hot(chosen, len(bias)) * shares[..., None], axis=2)
    return out + linear(by_expert, bias).astype(out.dtype)


def _of_tokens(
    gated: Gated,
    x: Float[Array, "B T M"],
    chosen: Int[Array, "B T per_token"],
    shares: Float[Array, "B T per_token"],
    weights: Weights,
) -> Float[Array, "B T M"]:
    tokens, owners = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    rows = dispatch("mixture", BACKENDS, None, gated, tokens, owners, weights)
    rows = rows.reshape(*chosen.shape, x.shape[-1]).astype(jnp.float32)
    return jnp.sum(rows * shares[..., None], axis=2).astype(x.dtype)


def _ragged(gated: Gated, x: Float[Array, "T M"], owners: Int[Array, " R"], weights: Weights) -> Float[Array, "R M"]:
    check_numbers(weights["gate"])
    order, places, sizes = _sort(owners, len(weights["gate"]))
    rows = x[order // (owners.size // len(x))]

    def product(rows: Array, name: str) -> Array:
        return _with_bias(ragged_linear(rows, weights[name], sizes), weights, name, owners[order])

    return product(gated(product(rows, "gate"), product(rows, "up")), "down")[places]


def _gather(gated: Gated, x: Float[Array, "T M"], owners: Int[Array, " R"], weights: Weights) -> Float[Array, "R M"]:
    check_numbers(weights["gate"])
    rows = jnp.repeat(x, owners.size // len(x), axis=0)

    def product(rows: Array, name: str) -> Array:
        own = weights[name].at[owners].get(mode="promise_in_bounds")
        out = jax.vmap(partial(linear, dtype=jnp.float32))(rows, own).astype(rows.dtype)
        return _with_bias(out, weights, name, owners)

    return product(gated(product(rows, "gate"), product(rows, "up")), "down")


def _gather_few(gated: Gated, x: Array, owners: Int[Array, " R"], weights: Weights) -> Float[Array, "R M"]:
    if owners.size > (experts := weights["gate"].shape[0]):
        raise LeftToXLA(f"The weights of {experts} experts are read once for each of {owners.size} rows.")
    return (_codes if is_coded(weights["gate"]) else _gather)(gated, x, owners, weights)


def _codes(gated: Gated, x: Float[Array, "T M"], owners: Int[Array, " R"], weights: Weights) -> Float[Array, "R M"]:
    """Rows of one expert behind each other, so that its codes come from memory once."""
    order, places, _ = _sort(owners, weights["gate"].shape[0])
    rows, experts = (x, owners) if len(x) == 1 else (x[order // (owners.size // len(x))], owners[order])
    inner = quantised_experts(rows, experts, weights["gate"], weights["up"])
    gate, up = (
        _with_bias(y.astype(x.dtype), weights, name, experts) for y, name in zip(inner, ("gate", "up"), strict=True)
    )
    (out,) = quantised_experts(gated(gate, up), experts, weights["down"])
    return out if len(x) == 1 else out[places]


def _blocks(gated: Gated, x: Float[Array, "T M"], owners: Int[Array, " R"], weights: Weights) -> Float[Array, "R M"]:
    """Rows of one expert after the other, so many at a time; the last of an expert take others' rows with them."""
    count, experts = owners.size, weights["gate"].shape[0]
    size = 1 if count <= experts else min(max(count // experts, _FEWEST), _MOST)
    order, places, sizes = _sort(owners, experts)
    blocks = -(-sizes // size)
    after, first = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    before = after - blocks
    # As many as there may be, however the rows are spread.
    numbers = jnp.arange((count + min(experts, count) * (size - 1)) // size, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(after, numbers, side="right"), experts - 1)
    starts = jnp.minimum(first[own] + (numbers - before[own]) * size, count)
    source = jnp.pad(order // (count // len(x)), (0, size))

    def block(where: tuple[Array, Array]) -> Array:
        expert, start = where
        rows = x[jax.lax.dynamic_slice_in_dim(source, start, size)]

        def product(rows: Array, name: str) -> Array:
            own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), weights[name])
            return _with_bias(linear(rows, own), weights, name, expert[None])

        return product(gated(product(rows, "gate"), product(rows, "up")), "down")

    out = jax.lax.map(block, (own, starts))
    inside = places - first[owners]
    return out[before[owners] + inside // size, inside % size]


BACKENDS = {"tpu": _ragged, "gpu": _gather_few, "xla": _blocks}


def _with_bias(rows: Float[Array, "R F"], weights: Weights, name: str, owners: Int[Array, " _"]) -> Array:
    """Rows with the biases of their experts; the outputs' are added later."""
    bias = weights.get(f"{name}_bias")
    return rows if bias is None else rows + bias[owners]


def _sort(owners: Int[Array, " R"], experts: int) -> tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " E"]]:
    """Rows in the order of their experts, the place of each in it, and the number of every expert's rows."""
    order = jnp.argsort(owners, stable=True)
    places = jnp.argsort(order)
    sizes = jnp.sum(owners[:, None] == jnp.arange(experts, dtype=owners.dtype)[None], axis=0, dtype=jnp.int32)
    return order, places, sizes
