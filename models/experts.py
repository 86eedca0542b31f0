"""Experts of a layer: a router chooses few of them for every token, and a token goes through these alone.

A row is a token on its way through one expert. Each backend multiplies rows with the weights of their experts, which
stay where they are: "ragged" and "blocks" sort the rows by expert, "gather" reads an expert for every row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import matmul_precision, platform
from clusterkv_jax.models.config import Experts
from clusterkv_jax.sharding import ambient_mesh, partition

BACKENDS = ("ragged", "gather", "blocks")
# Rows that are multiplied with the weights of their expert at once.
_FEWEST, _MOST = 8, 128
# Logical axes of the experts' weights: all devices share every expert, whichever are chosen.
AXES = {
    "gate": ("experts", "model", "mlp"),
    "up": ("experts", "model", "mlp"),
    "down": ("experts", "mlp", "model"),
}


def mixture(
    weights: dict[str, Array],
    experts: Experts,
    activation: Callable[[Array], Array],
    x: Float[Array, "B T M"],
    *,
    backend: str | None = None,
) -> Float[Array, "B T M"]:
    """The outputs of each token's experts, added up by the router's shares.

    `backend` None takes "ragged" on a TPU, which has an instruction for it; elsewhere `jax.lax.ragged_dot` multiplies
    every row with every expert. A GPU takes "gather" for as few rows as there are experts: the compiler makes the
    gather a part of the product, so that nothing is copied. All else takes "blocks".
    """
    chosen, shares = route(weights["router"], experts, x)
    operands = x, chosen, shares, weights["gate"], weights["up"], weights["down"]
    mesh = ambient_mesh()
    if mesh is None:
        return _of_tokens(activation, backend, *operands)
    tokens = partition(("batch", "tokens", None), x.shape, mesh)
    inner, outer = (partition(AXES[name], weights[name].shape, mesh) for name in ("gate", "down"))
    split = tuple(jax.tree.leaves(inner[2]))

    def part(*operands: Array) -> Array:
        # Each device sorts its own tokens, and has its own hidden units of every expert.
        out = _of_tokens(activation, backend, *operands)
        return jax.lax.psum(out, split) if split else out

    specs = (tokens, tokens, tokens, inner, inner, outer)
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)(*operands)


def route(
    router: Float[Array, "E M"], experts: Experts, x: Float[Array, "B T M"]
) -> tuple[Int[Array, "B T per_token"], Float[Array, "B T per_token"]]:
    """Each token's experts, the likeliest first, and their shares: float32 probabilities among all E experts."""
    logits = jnp.einsum("btm,em->bte", x, router, precision=matmul_precision(x.dtype))
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), experts.per_token)
    if experts.normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def _of_tokens(activation: Callable[[Array], Array], backend: str | None, *operands: Array) -> Array:
    x, chosen, shares, gate, up, down = operands
    tokens, owners = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    run = {"ragged": _ragged, "gather": _gather, "blocks": _blocks}[backend or _choose(owners.size, len(gate))]
    rows = run(activation, tokens, owners, gate, up, down)
    rows = rows.reshape(*chosen.shape, x.shape[-1]).astype(jnp.float32)
    return jnp.sum(rows * shares[..., None], axis=2).astype(x.dtype)


def _choose(rows: int, experts: int) -> str:
    if platform() == "tpu":
        return "ragged"
    return "gather" if platform() == "gpu" and rows <= experts else "blocks"


def _ragged(
    activation: Callable[[Array], Array],
    x: Float[Array, "T M"],
    owners: Int[Array, " R"],
    gate: Float[Array, "E M F"],
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
) -> Float[Array, "R M"]:
    order, places, sizes = _sort(owners, len(gate))
    rows = x[order // (owners.size // len(x))]

    def product(rows: Array, weights: Array) -> Array:
        return jax.lax.ragged_dot(rows, weights, sizes, precision=matmul_precision(rows.dtype))

    return product(activation(product(rows, gate)) * product(rows, up), down)[places]


def _gather(
    activation: Callable[[Array], Array],
    x: Float[Array, "T M"],
    owners: Int[Array, " R"],
    gate: Float[Array, "E M F"],
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
) -> Float[Array, "R M"]:
    rows = jnp.repeat(x, owners.size // len(x), axis=0)

    def product(rows: Array, weights: Array) -> Array:
        own = weights.at[owners].get(mode="promise_in_bounds")
        options: Any = {"precision": matmul_precision(rows.dtype), "preferred_element_type": jnp.float32}
        return jnp.einsum("rm,rmf->rf", rows, own, **options).astype(rows.dtype)

    return product(activation(product(rows, gate)) * product(rows, up), down)


def _blocks(
    activation: Callable[[Array], Array],
    x: Float[Array, "T M"],
    owners: Int[Array, " R"],
    gate: Float[Array, "E M F"],
    up: Float[Array, "E M F"],
    down: Float[Array, "E F M"],
) -> Float[Array, "R M"]:
    """Rows of one expert after the other, so many at a time; the last of an expert take others' rows with them."""
    count, experts = owners.size, len(gate)
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
        inner = activation(_product(rows, gate, expert)) * _product(rows, up, expert)
        return _product(inner, down, expert)

    out = jax.lax.map(block, (own, starts))
    inside = places - first[owners]
    return out[before[owners] + inside // size, inside % size]


def _product(rows: Array, weights: Array, expert: Array) -> Array:
    own = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
    return jnp.matmul(rows, own, precision=matmul_precision(rows.dtype))


def _sort(owners: Int[Array, " R"], experts: int) -> tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " E"]]:
    """Rows in the order of their experts, the place of each in it, and the number of every expert's rows."""
    order = jnp.argsort(owners, stable=True)
    places = jnp.argsort(order)
    sizes = jnp.sum(owners[:, None] == jnp.arange(experts, dtype=owners.dtype)[None], axis=0, dtype=jnp.int32)
    return order, places, sizes
