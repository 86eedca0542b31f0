"""Queries over a layer's cache, whatever groups or pages its heads stand in."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from clusterkv_jax.cache import pages
from clusterkv_jax.cache.layers import Layer, LayerCache, PagedHeads, WindowCache, group_heads, groups
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.degrees import raised
from clusterkv_jax.kernels.paged_attention import paged_attention
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.runtime.checks import check_queries
from clusterkv_jax.runtime.dispatch import matmul_operands, matmul_precision, traits
from clusterkv_jax.runtime.errors import is_number, shown
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import (
    CACHE_AXES,
    HEAD_AXES,
    PAGE_AXES,
    ambient_mesh,
    on_one_device,
    partition,
    slot_axes,
    slots_before,
)

# Queries whose scores to all rows exist at once where no kernel keeps them to itself.
MOST_QUERIES = 512


@own_settings()
def attend(layer: Layer, query: Float[Array, "B H D"], *, degree_power: float = 1.0) -> Float[Array, "B H D"]:
    """softmax(q k / sqrt(D) + degree_power log degree) v of one query per head over the layer's rows (CentroidKV
    equation 3, whose power is 1).

    Raises ValueError if the shapes do not fit, or for a power outside [0, 1]. Numbers are not looked at, since steps
    wait for nothing.
    """
    first = groups(layer)[0]
    kv_heads = sum(map(len, group_heads(layer)))
    check_queries("query", query, first.keys.shape[0], kv_heads, first.keys.shape[-1])
    if not (is_number(degree_power) and 0 <= degree_power <= 1):
        raise ValueError(f"degree_power must be between 0 and 1, got {shown(degree_power)}.")
    return _attend(layer, query, float(degree_power))


@partial(jax.jit, static_argnames="degree_power")
def _attend(layer: Layer, query: Float[Array, "B H D"], degree_power: float) -> Float[Array, "B H D"]:
    return attend_cache(layer, query[:, None], degree_power=degree_power)[0][:, 0]


def attend_cache(
    layer: Layer, q: Float[Array, "B T H D"], soft_cap: float | None = None, degree_power: float = 1.0
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every query over all rows of the cache; returns the output and the log-sum-exp of the biased scores.

    `soft_cap` c makes of a score s c tanh(s / c), before the bias, which is `degree_power` times log degree.
    """
    if q.shape[1] > MOST_QUERIES:
        return _in_parts(partial(attend_cache, layer, soft_cap=soft_cap, degree_power=degree_power), q)
    if isinstance(layer, LayerCache):
        out, lse = _attend_rows(q, layer, soft_cap, degree_power)
        return out, with_mean(lse, q, layer.key_mean)
    if isinstance(layer, PagedHeads):
        out, lse = _attend_pages(q, layer, soft_cap, degree_power)
        return out, with_mean(lse, q, layer.key_mean)
    if isinstance(layer, WindowCache):
        return attend_cache(layer.rows, q, soft_cap, degree_power)
    kv_heads = sum(map(len, layer.heads))
    parts = [
        attend_cache(group, query_heads(q, index, kv_heads, axis=2), soft_cap, degree_power)
        for group, index in zip(layer.groups, layer.heads, strict=True)
    ]
    out, lse = zip(*parts, strict=True)
    return join_heads(out, layer.heads), join_heads(lse, layer.heads)


def _in_parts(
    attend: Callable[..., tuple[Array, Array]], *of_queries: Shaped[Array, "B T ..."]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Attention of some queries after the other, so that scores of all of them never exist at once."""
    starts = range(0, of_queries[0].shape[1], MOST_QUERIES)
    parts = [attend(*(x[:, start : start + MOST_QUERIES] for x in of_queries)) for start in starts]
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, axis=1), jnp.concatenate(lse, axis=1)


def attend_with_probabilities(
    group: LayerCache, q: Float[Array, "B T H D"], soft_cap: float | None = None, degree_power: float = 1.0
) -> tuple[tuple[Float[Array, "B T H D"], Float[Array, "B T H"]], Float[Array, "B K C"]]:
    """`attend_cache` over one group of heads, and what each of its rows got: the probabilities of all T queries in sum,
    mean over the query heads of a KV head. They are among the rows: what sinks would take of them is left out.
    """
    out, lse, probs = _attend_rows(q, group, soft_cap, degree_power, return_probs=True)
    batch, kv_heads, slots = group.degree.shape
    return (out, with_mean(lse, q, group.key_mean)), jnp.mean(probs.reshape(batch, kv_heads, -1, slots), axis=2)


def with_mean(
    lse: Float[Array, "B T H"], q: Float[Array, "B T H D"], mean: Float[Array, "B K 1 D"] | None
) -> Float[Array, "B T H"]:
    """Log-sum-exps over keys that are stored less their mean, as those over the keys themselves."""
    if mean is None:
        return lse
    grouped = q.astype(jnp.float32).reshape(*q.shape[:2], mean.shape[1], -1, q.shape[3])
    score = jnp.einsum("btkgd,bkd->btkg", grouped, mean[:, :, 0], precision=jax.lax.Precision.HIGHEST)
    return lse + score.reshape(lse.shape) * q.shape[3] ** -0.5


def query_heads(x: Array, heads: tuple[int, ...], kv_heads: int, *, axis: int) -> Array:
    """The query heads, along `axis`, that read these of `kv_heads` KV heads."""
    shape = x.shape
    grouped = x.reshape(*shape[:axis], kv_heads, -1, *shape[axis + 1 :])
    part = jnp.take(grouped, jnp.asarray(heads), axis=axis)
    return part.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def join_heads(pieces: Sequence[Float[Array, "B T _ ..."]], heads: tuple[tuple[int, ...], ...]) -> Array:
    """Outputs of the query heads of each group of KV heads, in the order of the model's heads."""
    order = [head for group in heads for head in group]
    back = jnp.asarray(sorted(range(len(order)), key=order.__getitem__))
    by_kv_head = [x.reshape(*x.shape[:2], len(group), -1, *x.shape[3:]) for x, group in zip(pieces, heads, strict=True)]
    heads_in_order = jnp.take(jnp.concatenate(by_kv_head, axis=2), back, axis=2)
    return heads_in_order.reshape(*heads_in_order.shape[:2], -1, *heads_in_order.shape[4:])


@jax.named_scope("attend")
def _attend_pages(
    q: Float[Array, "B T H D"], layer: PagedHeads, soft_cap: float | None, degree_power: float
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every page is asked by its head's queries, and a head's pages are combined by their log-sum-exps. A GPU reads a
    head's pages as one row of slots: 64 queries would have 16 numbers for each that the pages hold.
    """
    if traits().host_driven and on_one_device():
        held = layer.keys, layer.values, layer.degree, layer.length, layer.first
        return paged_attention(q, *held, soft_cap=soft_cap, degree_power=degree_power)
    batch, tokens, _, dim = q.shape
    kv_heads, owner = layer.length.shape[1], pages.owners(layer)

    def of_page(x):
        return jnp.take_along_axis(x, owner.reshape(batch, 1, -1, *[1] * (x.ndim - 3)), axis=2)

    queries = of_page(q.reshape(batch, tokens, kv_heads, -1, dim))
    asked = queries.reshape(batch, tokens, -1, dim), pages.page_view(layer)
    out, lse = _attend_rows(*asked, soft_cap, degree_power, axes=PAGE_AXES)
    out, lse = out.reshape(queries.shape).astype(jnp.float32), lse.reshape(queries.shape[:-1])

    mine = (owner[:, None] == jnp.arange(kv_heads)[None, :, None])[:, None, :, :, None]
    lse = jnp.where(mine, lse[:, :, None], -jnp.inf)
    peak = jnp.max(lse, axis=3, keepdims=True)
    peak = jnp.where(peak > -jnp.inf, peak, 0.0)  # of a head without rows: -inf - -inf is no number
    weight = jnp.exp(lse - peak)
    total = jnp.sum(weight, axis=3, keepdims=True)
    share = weight / jnp.where(total > 0, total, 1.0)
    mixed = jnp.einsum("btkpg,btpgd->btkgd", share, out, precision=jax.lax.Precision.HIGHEST)
    return mixed.reshape(q.shape).astype(q.dtype), (peak + jnp.log(total)).reshape(q.shape[:3])


@jax.named_scope("attend")
def _attend_rows(
    q: Float[Array, "B T H D"],
    layer: LayerCache,
    soft_cap: float | None,
    degree_power: float,
    return_probs: bool = False,
    axes: Mapping[int, tuple[str | None, ...]] = CACHE_AXES,
) -> tuple[Array, ...]:
    """`biased_attention` over one group of heads, each device its own: the partitioner cannot look into a kernel.

    Devices that share the slots of a head combine what each of them found.
    """

    def attend(q: Array, layer: LayerCache, length: Array) -> tuple[Array, ...]:
        rows = (layer.keys, layer.values, raised(layer.degree, degree_power), length)
        return biased_attention(q, *rows, soft_cap=soft_cap, return_lse=True, return_probs=return_probs)

    mesh = ambient_mesh()
    if mesh is None:
        return attend(q, layer, layer.length)
    # Query heads go where their KV head is: split as those are, and whole where those are whole.
    queries = partition(("batch", None, axes[3][1]), (*q.shape[:2], layer.keys.shape[1]), mesh)
    axes = HEAD_AXES if return_probs else axes
    axes = {**axes, 2: ("batch", axes[3][1])}  # pages have lengths of their own here
    rows = jax.tree.map(lambda x: partition(axes[x.ndim], x.shape, mesh), layer)
    out = (queries, queries, *([rows.degree] if return_probs else []))

    def local(q: Array, layer: LayerCache) -> tuple[Array, ...]:
        apart = slot_axes(rows)
        if not apart:
            return attend(q, layer, layer.length)
        here = jnp.clip(layer.length - slots_before(rows, layer), 0, layer.capacity)
        out, lse = attend(q, layer, here)
        return _combined(out, lse, apart)

    return jax.shard_map(local, mesh=mesh, in_specs=(queries, rows), out_specs=out, check_vma=False)(q, layer)


def _combined(
    out: Float[Array, "B T H D"], lse: Float[Array, "B T H"], axes: tuple[str, ...]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Attention over the rows of all devices along these mesh axes, from what each has over its own; one collective."""
    parts = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)
    parts = jax.lax.all_gather(parts, axes)
    outs, lses = parts[..., :-1], parts[..., -1]
    total = jax.nn.logsumexp(lses, axis=0, keepdims=True)
    # A device without rows adds nothing; where none has any, -inf - -inf is no number.
    share = jnp.exp(lses - jnp.where(total > -jnp.inf, total, 0.0))
    return jnp.sum(share[..., None] * outs, axis=0).astype(out.dtype), total[0]


@jax.named_scope("attend")
def attend_new(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    real: Bool[Array, "B T"],
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """T new tokens among themselves, causally; as `attend_cache`, for outputs that are then combined."""
    tokens = q.shape[1]
    causal = jnp.tril(jnp.ones((1, tokens, tokens), bool)) & real[:, None, :]
    # A padded query sees itself, so that it has something to see.
    causal |= jnp.eye(tokens, dtype=bool)[None]
    return attend_where(q, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), causal, soft_cap)


def attend_where(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B K N D"],
    values: Float[Array, "B K N D"],
    visible: Bool[Array, "B T N"],
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Each query over the rows that it sees, at least one; as `attend_cache`."""
    if q.shape[1] > MOST_QUERIES:
        return _in_parts(lambda q, visible: attend_where(q, keys, values, visible, soft_cap), q, visible)
    batch, tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    score = jnp.einsum(
        "btkgd,bksd->btkgs",
        *matmul_operands(grouped, keys),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    score = jnp.where(visible[:, :, None, None, :], capped(score * dim**-0.5, soft_cap), -jnp.inf)
    lse = jax.nn.logsumexp(score, axis=-1)
    out = jnp.einsum(
        "btkgs,bksd->btkgd",
        *matmul_operands(jnp.exp(score - lse[..., None]).astype(values.dtype), values),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, tokens, heads)


def combine(
    first: tuple[Float[Array, "B T H D"], Float[Array, "B T H"]],
    second: tuple[Float[Array, "B T H D"], Float[Array, "B T H"]],
    sink_logits: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H D"]:
    """Attention over the union of two disjoint sets of rows, from (output, log-sum-exp) over each; sinks count once."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    share = jax.nn.sigmoid(lse_1 - lse_2)[..., None]  # exp(lse_1) / (exp(lse_1) + exp(lse_2))
    mixed = share * out_1.astype(jnp.float32) + (1 - share) * out_2.astype(jnp.float32)
    if sink_logits is not None:
        mixed = with_sinks((mixed, jnp.logaddexp(lse_1, lse_2)), sink_logits)
    return mixed.astype(out_1.dtype)


def with_sinks(
    attended: tuple[Float[Array, "B T H D"], Float[Array, "B T H"]], sink_logits: Float[Array, " H"] | None
) -> Float[Array, "B T H D"]:
    """Attention by a softmax with one logit more for each head, which has no value, from (output, log-sum-exp) over all
    rows; without sinks the output as it is.
    """
    out, lse = attended
    if sink_logits is None:
        return out
    share = jax.nn.sigmoid(lse - sink_logits.astype(jnp.float32)[None, None])
    return (share[..., None] * out.astype(jnp.float32)).astype(out.dtype)
