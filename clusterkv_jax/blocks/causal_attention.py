"""Causal attention over whole prompts: the library's kernel of each accelerator, tiles on a CPU, else blocks in XLA.

    gpu    cuDNN: 16-bit types, no soft cap, no sinks
    tpu    splash: head_dim a multiple of 128, no sinks
    cpu    tiles
    xla    blocks of queries, one after the other

Prompts are padded on the right, so causality alone keeps padding out of the rows of real tokens.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.tiled_attention import tiled_attention, visible
from clusterkv_jax.kernels.soft_cap import capped
from clusterkv_jax.runtime.dispatch import LeftToXLA, dispatch, platform
from clusterkv_jax.runtime.sharding import ambient_mesh, partition

SCORES_AT_ONCE = 2**26  # in plain XLA, in elements (f32): 256 MiB
LARGEST_BLOCK = 256
# Queries of a later segment see longer prefixes of the keys: with 4 segments 5/8 of the N x N scores are computed
# instead of all, with 8 9/16, at the price of as many loop bodies to compile; for a GPU that takes a second each.
SEGMENTS = {"cpu": 8, "gpu": 4, "tpu": 4}


@jax.named_scope("attention/attend")
def causal_attention(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " H"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B N H D"]:
    """softmax(q k / sqrt(D)) v where query n sees the keys 0..n; query head h reads KV head h // (H / K).

    With a `window` query n sees the last so many of them, at a cost linear in N. A `soft_cap` c makes of a score s
    c tanh(s / c), and `sink_logits` give the softmax of each head a logit more, without a value. `backend` is one of
    `BACKENDS`; None takes the first that serves these shapes on the device that is compiled for.
    """
    window = None if window is None or window >= k.shape[1] else window
    options = {"window": window, "soft_cap": soft_cap, "sink_logits": sink_logits}
    return dispatch("causal_attention", BACKENDS, backend, q, k, v, **options)


def last_queries_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " H"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B T H D"]:
    """`causal_attention` of the last T of N tokens on one device, whose query heads are those of its KV heads."""
    window = None if window is None or window >= k.shape[1] else window
    options = {"window": window, "soft_cap": soft_cap, "sink_logits": sink_logits}
    return dispatch("last_queries_attention", OF_LAST_QUERIES, backend, q, k, v, **options)


def attention_with_lse(
    q: Float[Array, "B T H D"],
) -> Callable[..., tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]] | None:
    """The library's attention of these queries to other rows than their own, None where this device has none.

    What is returned takes (queries, keys, values, lengths), heads first: queries [B,H,T,D], and rows [B,K,N,D] of which
    a query sees the first `lengths`; with None it sees the rows up to its own. It gives the output and the log-sum-exp
    of the scores in float32. Caches have heads first, and another order would be a copy of them.
    """
    return dispatch("attention_with_lse", {"gpu": _with_lse_by_cudnn, "xla": lambda _: None}, None, q)


def _with_lse_by_cudnn(q: Array) -> Callable[..., tuple[Array, Array]]:
    over_mesh = None if ambient_mesh() is None else "it takes the heads of one device"
    _refuse("cudnn", _obstacle("cudnn", q, None, None), over_mesh, _moved())

    def attention(q: Array, keys: Array, values: Array, lengths: Array | None) -> tuple[Array, Array]:
        kind, options = "CAUSAL", {}
        if lengths is not None:
            queries = jnp.full(len(q), q.shape[2], jnp.int32)
            kind, options = "PADDING", {"q_seqlen": queries, "kv_seqlen": lengths.astype(jnp.int32)}
        return _cudnn_with_lse(q, keys, values, kind, qkv_layout="BNTH", **options)

    return attention


def missing(backend: str, dim: int, soft_cap: float | None, sinks: bool) -> str | None:
    """What a library's kernel, "cudnn" or "splash", lacks for attention with heads of this size, None if nothing."""
    if sinks:
        return "it has no gradients of sinks" if backend == "cudnn" else "it is not given sink logits"
    if backend == "cudnn" and soft_cap is not None:
        return f"it has no soft cap of scores, got {soft_cap}"
    if backend == "cudnn":
        fits = dim % 8 == 0 and dim <= 128
        return None if fits else f"it needs a head_dim that is a multiple of 8 up to 128, got {dim}"
    return None if dim % 128 == 0 else f"it needs a head_dim that is a multiple of 128, got {dim}"


def _obstacle(library: str, q: Array, soft_cap: float | None, sink_logits: Array | None) -> str | None:
    """Why a library cannot serve these queries, None if it can."""
    if why := missing(library, q.shape[-1], soft_cap, sink_logits is not None):
        return why
    if library == "splash":
        return None if q.shape[1] % 128 == 0 else f"it needs a multiple of 128 queries, got {q.shape[1]}"
    if jax.default_backend() != "gpu":
        return f"it needs cuDNN when it is traced, the default device is {jax.default_backend()}"
    return None if q.dtype in (jnp.bfloat16, jnp.float16) else f"it needs bfloat16 or float16, got {q.dtype}"


def _by_cudnn(q: Array, k: Array, v: Array, *, window: int | None, soft_cap: float | None, sink_logits: Any) -> Array:
    _refuse("cudnn", _obstacle("cudnn", q, soft_cap, sink_logits), _split_otherwise(q, k))
    return _over_mesh(partial(_cudnn, window=window), q, k, v)


def _by_splash(q: Array, k: Array, v: Array, *, window: int | None, soft_cap: float | None, sink_logits: Any) -> Array:
    several = ambient_mesh() is None and jax.device_count() > 1
    no_mesh = "over several devices it needs a mesh (jax.set_mesh)" if several else None
    _refuse("splash", _obstacle("splash", q, soft_cap, sink_logits), no_mesh, _split_otherwise(q, k))
    return _over_mesh(partial(_splash, window=window, soft_cap=soft_cap), q, k, v)


def _last_by_cudnn(
    q: Array, k: Array, v: Array, *, window: int | None, soft_cap: float | None, sink_logits: Any
) -> Array:
    odd = "it is given an even number of queries, without a window" if window is not None or q.shape[1] % 2 else None
    _refuse("cudnn", _obstacle("cudnn", q, soft_cap, sink_logits), odd, _moved())
    return _in_pieces(q, k, v)


def _last_by_splash(
    q: Array, k: Array, v: Array, *, window: int | None, soft_cap: float | None, sink_logits: Any
) -> Array:
    _refuse("splash", _obstacle("splash", q, soft_cap, sink_logits))
    return _splash(q, k, v, window, soft_cap)


def _refuse(library: str, *obstacles: str | None) -> None:
    """Raise LeftToXLA with the first obstacle, if there is one."""
    for why in filter(None, obstacles):
        raise LeftToXLA(f"{library} cannot serve this attention: {why}.")


def _split_otherwise(q: Array, k: Array) -> str | None:
    if _spec(q, "heads") == _spec(k, "kv_heads"):
        return None
    return f"the mesh splits {q.shape[2]} query heads otherwise than {k.shape[2]} KV heads"


def _in_parts(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H D"]:
    """The last T queries, one segment after the other."""
    batch, length, heads, dim = q.shape
    before = k.shape[1] - length
    seen = k.shape[1] if window is None else min(k.shape[1], window + LARGEST_BLOCK)
    block = min(LARGEST_BLOCK, max(16, SCORES_AT_ONCE // (batch * heads * seen)))
    # Blocks within a window see as many keys each: they need no segments.
    edges = segment_edges(length) if window is None else [0, length]
    sinks = None if sink_logits is None else sink_logits.reshape(k.shape[2], -1).astype(jnp.float32)

    @jax.vmap
    def attend(q: Array, k: Array, v: Array) -> Array:
        parts = [
            _in_blocks(q[:, :, a:b], k[:, : before + b], v[:, : before + b], before + a, block, window, soft_cap, sinks)
            for a, b in pairwise(edges)
        ]
        return jnp.concatenate(parts, axis=2)

    # Heads first: products then leave no array to be transposed but these.
    q = q.reshape(batch, length, k.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
    out = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2))
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


BACKENDS = {"gpu": _by_cudnn, "tpu": _by_splash, "cpu": tiled_attention, "xla": _in_parts}
OF_LAST_QUERIES = {"gpu": _last_by_cudnn, "tpu": _last_by_splash, "cpu": tiled_attention, "xla": _in_parts}


def segment_edges(length: int) -> list[int]:
    """Where segments of the queries begin and end."""
    segments = max(1, min(SEGMENTS[platform()], length // LARGEST_BLOCK))
    return [length * i // segments for i in range(segments + 1)]


def _in_blocks(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K N D"],
    v: Float[Array, "K N D"],
    offset: int | Int[Array, ""],
    largest: int,
    window: int | None,
    soft_cap: float | None,
    sink_logits: Float[Array, "K G"] | None,
) -> Float[Array, "K G T D"]:
    """Blocks of queries one after the other, so that scores of all queries never exist at once, backward included.

    With a window each block looks at as many keys as its queries can see together.
    """
    kv_heads, group, queries, dim = q.shape
    count = math.ceil(queries / largest)
    block = math.ceil(queries / count)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, count * block - queries), (0, 0)))
    q = jnp.moveaxis(q.reshape(kv_heads, group, count, block, dim), 2, 0)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    if window is not None:
        k, v = (jnp.pad(x, ((0, 0), (window - 1, count * block - queries), (0, 0))) for x in (k, v))

    @jax.checkpoint
    def attend(chunk):
        start, query = chunk
        keys, values, first = k, v, 0
        if window is not None:
            first = start - window + 1
            keys, values = (jax.lax.dynamic_slice_in_dim(x, start, block + window - 1, axis=1) for x in (k, v))
        scores = jnp.einsum("kgtd,knd->kgtn", query, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = capped(scores * dim**-0.5, soft_cap)
        scores = jnp.where(visible(start, block, first, keys.shape[1], window), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        if sink_logits is not None:
            weights *= jax.nn.sigmoid(jax.nn.logsumexp(scores, axis=-1) - sink_logits[..., None])[..., None]
        return jnp.einsum("kgtn,knd->kgtd", weights.astype(v.dtype), values, precision=precision)

    starts = offset + block * jnp.arange(count, dtype=jnp.int32)
    out = attend((starts[0], q[0]))[None] if count == 1 else jax.lax.map(attend, (starts, q))
    return jnp.moveaxis(out, 0, 2).reshape(kv_heads, group, count * block, dim)[:, :, :queries]


def _spec(x: Array, heads: str) -> PartitionSpec:
    mesh = ambient_mesh()
    return PartitionSpec() if mesh is None else partition(("batch", None, heads, None), x.shape, mesh)


def _over_mesh(kernel: Callable[[Array, Array, Array], Array], q: Array, k: Array, v: Array) -> Array:
    """Each device attends with its own rows and heads; the partitioner cannot look into a library's kernel."""
    mesh = ambient_mesh()
    if mesh is None:
        return kernel(q, k, v)
    spec = _spec(q, "heads")
    return jax.shard_map(kernel, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(q, k, v)


def _cudnn(q: Array, k: Array, v: Array, window: int | None) -> Array:
    # Odd lengths are refused in places that differ between versions; one row of padding behind the end is cheap.
    length = q.shape[1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (q, k, v))
    before = None if window is None else (window - 1, 0)
    options: Any = {"is_causal": True, "local_window_size": before, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **options)[:, :length]


def _cudnn_module() -> Any:
    """jax's inner module, None where it has moved: its public function rounds the log-sum-exp to 8 bits."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


def _moved() -> str | None:
    return "this JAX has its module elsewhere" if _cudnn_module() is None else None


def _cudnn_with_lse(q: Array, k: Array, v: Array, mask: str, **options: Any) -> tuple[Array, Array]:
    """Attention of q [B,T,H,D] to k, v [B,N,K,D] and the log-sum-exp of its scores, f32 [B,H,T]."""
    cudnn = _cudnn_module()
    options |= {"scale": q.shape[-1] ** -0.5, "mask_type": cudnn.MaskType[mask], "return_residual": True}
    return cudnn.dot_product_attention(q, k, v, **options)


@jax.custom_vjp
def _in_pieces(
    q: Float[Array, "B T H D"], k: Float[Array, "B N K D"], v: Float[Array, "B N K D"]
) -> Float[Array, "B T H D"]:
    """The last T queries by cuDNN: to their own tokens, to all earlier ones, and combined by the log-sum-exps.

    The library's derivative leaves out that of the log-sum-exp, so backwards goes through XLA's blocks.
    """
    before = k.shape[1] - q.shape[1]
    own, own_lse = _cudnn_with_lse(q, k[:, before:], v[:, before:], "CAUSAL")
    if not before:
        return own
    earlier, lse = _cudnn_with_lse(q, k[:, :before], v[:, :before], "NO_MASK")
    share = jax.nn.sigmoid(lse - own_lse).swapaxes(1, 2)[..., None]
    return (share * earlier + (1 - share) * own).astype(q.dtype)


def _in_pieces_forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _in_pieces(q, k, v), (q, k, v)


def _in_pieces_backward(operands: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, ...]:
    return jax.vjp(_in_parts, *operands)[1](cotangent)


_in_pieces.defvjp(_in_pieces_forward, _in_pieces_backward)


@cache
def _mask(length: int, rows: int, heads: int, block: int, window: int | None) -> Any:
    """The kernel's mask of the last `length` of so many rows. The library looks at every block of it, number by number:
    a minute's work for 131,072 tokens. So blocks that are wholly seen, or not at all, are always the same two.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    blocks = np.zeros((block, block), bool), np.ones((block, block), bool)
    before, reach = rows - length, rows if window is None else window

    kind: Any = masks.CausalMask if window is None else masks.LocalMask

    class Blocks(kind):
        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            queries, keys = idx
            first, last = queries.start + before, queries.stop + before - 1
            if keys.start > last or keys.stop <= first - reach + 1:
                return blocks[0]
            if keys.stop <= first + 1 and keys.start > last - reach:
                return blocks[1]
            return super().__getitem__(idx)

    sizes: Any = {"window_size": (reach - 1, 0)} if window is not None else {}
    return masks.MultiHeadMask([Blocks((length, rows), offset=before, **sizes)] * heads)


def _splash(q: Array, k: Array, v: Array, window: int | None, soft_cap: float | None) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    _, length, heads, dim = q.shape
    block = next(size for size in (1024, 512, 256, 128) if length % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    attend: Any = kernel.make_splash_mha_single_device(
        _mask(length, k.shape[1], heads, block, window), block_sizes=sizes, attn_logits_soft_cap=soft_cap
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(dim**-0.5, q.dtype), k, v))
    return jax.vmap(attend)(q, k, v).swapaxes(1, 2)
