"""Prefill and training attention against its definition, whatever the blocks, the backend or the mesh."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from clusterkv_jax.blocks import causal_attention as attention
from clusterkv_jax.blocks import context_parallel
from clusterkv_jax.blocks import tiled_attention as tiles
from clusterkv_jax.kernels.biased_attention import pallas_gpu, pallas_tpu
from clusterkv_jax.models.registry import from_hf
from clusterkv_jax.runtime import dispatch
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.families import HEAD_DIMS, PUBLISHED, SAME_AS
from tests.support.numbers import normal, relative


@pytest.fixture(params=["cpu", "xla"])
def plain(request, monkeypatch) -> str:
    """A backend that serves everything on a CPU, in blocks so small that a short prompt has many."""
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    monkeypatch.setattr(tiles, "TILE", 16)
    return request.param


@partial(jax.jit, static_argnames=("offset", "window", "soft_cap"))
def dense(
    q: jax.Array, k: jax.Array, v: jax.Array, offset: int = 0, window: int = 10**6, soft_cap: float | None = None
) -> jax.Array:
    """The definition, with every score in memory."""
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bthd,bnhd->bhtn", q, k) / math.sqrt(q.shape[-1])
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    ahead = offset + np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    mask = (ahead >= 0) & (ahead < window)
    return jnp.einsum("bhtn,bnhd->bthd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_rows_without_values(plain, window):
    """Forwards, of the last queries, and backwards: as a first key that all see, of value zero."""
    q, k, v, sinks = normal(0, 2, 70, 4, 8), normal(1, 2, 70, 2, 8), normal(2, 2, 70, 2, 8), normal(3, 4)

    def definition(q: jax.Array, sinks: jax.Array, offset: int = 0) -> jax.Array:
        groups = [jnp.repeat(x, 2, axis=2) for x in (k, v)]
        ahead = offset + np.arange(q.shape[1])[:, None] - np.arange(70)
        scores = jnp.einsum("bthd,bnhd->bhtn", q, groups[0]) / math.sqrt(8)
        scores = jnp.where((ahead >= 0) & (ahead < (window or 70)), scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
        return jnp.einsum("bhtn,bnhd->bthd", weights, groups[1])

    def whole(q, sinks):
        return attention.causal_attention(q, k, v, window=window, sink_logits=sinks, backend=plain)

    assert relative(jax.jit(whole)(q, sinks), definition(q, sinks)) < 1e-6
    last = partial(attention.last_queries_attention, window=window, backend=plain, sink_logits=sinks)
    assert relative(jax.jit(last)(q[:, 50:], k, v), definition(q[:, 50:], sinks, 50)) < 1e-6
    gradients = [jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1)))(q, sinks) for f in (whole, definition)]
    assert relative(gradients[0][0], gradients[1][0]) < 1e-5
    assert relative(gradients[0][1], gradients[1][1]) < 1e-5
    why = "it has no gradients of sinks" if jax.default_backend() == "gpu" else "needs a GPU"
    with pytest.raises(NotImplementedError, match=why):
        attention.causal_attention(q, k, v, sink_logits=sinks, backend="gpu")


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(1, 4, 4), (5, 6, 2), (37, 3, 1), (37, 4, 4), (130, 6, 2)])
def test_causal_attention(plain, length, heads, kv_heads):
    q, k, v = normal(0, 2, length, heads, 8), normal(1, 2, length, kv_heads, 8), normal(2, 2, length, kv_heads, 8)
    got = jax.jit(partial(attention.causal_attention, backend=plain))(q, k, v)
    assert relative(got, dense(q, k, v)) < 1e-6


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (5, 0.7), (16, None), (40, 0.7), (70, None), (80, 0.7)])
def test_windows_and_soft_caps(plain, window, soft_cap):
    """Of all queries, of the last ones of a prompt, and backwards."""
    q, k, v = normal(0, 2, 70, 4, 8), normal(1, 2, 70, 2, 8), normal(2, 2, 70, 2, 8)
    options: Any = {"window": window, "soft_cap": soft_cap}
    whole = jax.jit(partial(attention.causal_attention, **options, backend=plain))
    assert relative(whole(q, k, v), dense(q, k, v, **options)) < 1e-6
    last = jax.jit(partial(attention.last_queries_attention, **options, backend=plain))
    assert relative(last(q[:, 50:], k, v), dense(q[:, 50:], k, v, offset=50, **options)) < 1e-6

    def gradient(function):
        return jax.jit(jax.grad(lambda x: jnp.sum(function(q, x, x + v) ** 2)))(k)

    assert relative(gradient(whole), gradient(partial(dense, **options))) < 1e-5


def test_a_window_costs_as_much_for_each_token():
    """No block of queries looks at more keys than it can see together, nor goes back over more tiles."""

    def program(backend: str, length: int, window: int | None) -> str:
        shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        attend = partial(attention.causal_attention, window=window, backend=backend)
        return str(jax.make_jaxpr(attend)(shape, shape, shape))

    def keys_of_a_block(length: int, window: int | None) -> int:
        return max(map(int, re.findall(r"\b256,(\d+)\]", program("xla", length, window))))

    def tiles_of_a_block(length: int, window: int | None) -> int:
        return min(map(int, re.findall(r"\blength=(\d+)", program("cpu", length, window))))

    assert keys_of_a_block(8192, 512) == keys_of_a_block(4096, 512) == 256 + 511
    assert keys_of_a_block(8192, None) > 4096
    assert tiles_of_a_block(8192, 512) == tiles_of_a_block(4096, 512) == 4
    assert tiles_of_a_block(8192, None) == 32


def test_sequences_of_a_batch_may_be_taken_one_after_the_other(monkeypatch):
    """As on a CPU, whose caches hold the scores of few."""
    monkeypatch.setattr(tiles, "TILE", 16)
    operands = normal(0, 5, 70, 4, 8), normal(1, 5, 70, 2, 8), normal(2, 5, 70, 2, 8)
    together = jax.jit(lambda *x: attention.causal_attention(*x)).lower(*operands)
    monkeypatch.setattr(tiles, "SCORES_AT_ONCE", 2 * 4 * 16 * 16)  # two sequences at once, one is left
    parts = jax.jit(lambda *x: attention.causal_attention(*x)).lower(*operands)
    scores_of_five = "tensor<5x2x2x14x14xf32>"  # five blocks of 70 tokens
    assert scores_of_five in together.as_text()
    assert scores_of_five not in parts.as_text()
    assert relative(parts.compile()(*operands), together.compile()(*operands)) < 1e-6


def test_tiles_that_no_query_sees_are_skipped():
    """Their keys are not read: nothing of them reaches a query, not even what is no number."""
    q, k, v = (normal(seed, 1, 1024, 2, 16) for seed in range(3))
    whole = jax.jit(partial(attention.causal_attention, window=300, backend="cpu"))
    poisoned = [x.at[:, 512:].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(whole(q, *poisoned)[:, :512], whole(q, k, v)[:, :512])
    before = [x.at[:, :256].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(whole(q, *before)[:, 768:], whole(q, k, v)[:, 768:])


def test_gradients_of_attention(plain):
    operands = normal(0, 1, 40, 4, 8), normal(1, 1, 40, 2, 8), normal(2, 1, 40, 2, 8)
    weight = normal(3, 1, 40, 4, 8)

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: jnp.sum(function(*x) * weight), argnums=(0, 1, 2)))(*operands)

    attend = partial(attention.causal_attention, backend=plain)
    for got, want in zip(gradients(attend), gradients(dense), strict=True):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_scores_of_all_queries_never_exist_at_once(backend):
    shape = jax.ShapeDtypeStruct((1, 8192, 4, 16), jnp.float32)

    def total(*operands):
        return jnp.sum(attention.causal_attention(*operands, backend=backend))

    text = jax.jit(jax.grad(total)).lower(shape, shape, shape).as_text()
    assert "x8192x" in text
    assert "8192x8192" not in text


@pytest.mark.parametrize(
    ("backend", "message"), [("gpu", "needs a GPU"), ("tpu", "needs a TPU"), ("flash", "there are gpu, tpu, cpu, xla")]
)
def test_a_backend_that_cannot_serve_says_why(backend, message):
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        attention.causal_attention(q, q, q, backend=backend)


def test_each_device_attends_with_its_own_heads():
    """What wraps a library's kernel under a mesh, here around the plain one."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v = normal(0, 2, 24, 8, 8), normal(1, 2, 24, 4, 8), normal(2, 2, 24, 4, 8)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda q, k, v: attention._over_mesh(attention.causal_attention, q, k, v))
        got = run(q, k, v)
        assert attention._spec(k, "kv_heads") == PartitionSpec("data", None, "model", None)
        assert attention._spec(k[:, :, :2], "kv_heads") != attention._spec(q, "heads")
    assert got.addressable_shards[0].data.shape == (1, 24, 2, 8)
    assert relative(got, dense(q, k, v)) < 1e-6


@pytest.mark.parametrize("length", [7, 8])
def test_odd_lengths_are_padded_for_cudnn(monkeypatch, length):
    """The padding only, with the library's plain implementation in place of its kernel."""
    plain, lengths = jax.nn.dot_product_attention, []

    def stand_in(q: jax.Array, *operands: jax.Array, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        lengths.append(q.shape[1] % 2)
        return plain(q, *operands, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = normal(0, 2, length, 4, 8), normal(1, 2, length, 2, 8), normal(2, 2, length, 2, 8)
    assert relative(attention._cudnn(q, k, v, None), dense(q, k, v)) < 1e-6
    assert relative(attention._cudnn(q, k, v, 3), dense(q, k, v, window=3)) < 1e-6
    assert lengths == [0, 0]


def with_lse(q: jax.Array, k: jax.Array, v: jax.Array, mask: str) -> tuple[jax.Array, jax.Array]:
    """What cuDNN's attention returns, in plain jnp."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bnhd->bhtn", q, k) / math.sqrt(q.shape[-1])
    if mask == "CAUSAL":
        scores = jnp.where(np.tri(q.shape[1], k.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhtn,bnhd->bthd", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize("before", [0, 30])
def test_pieces_of_a_library_are_one_attention(monkeypatch, before):
    """Forwards and backwards, with cuDNN's part done in jnp."""
    monkeypatch.setattr(attention, "_cudnn_with_lse", with_lse)
    q, k, v = normal(0, 2, 20, 4, 8), normal(1, 2, 20 + before, 2, 8), normal(2, 2, 20 + before, 2, 8)
    pieces = attention._in_pieces
    assert relative(pieces(q, k, v), dense(q, k, v, before)) < 1e-6
    gradients = [
        jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1, 2))(q, k, v)
        for f in (pieces, partial(dense, offset=before))
    ]
    for got, want in zip(*gradients, strict=True):
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize(("device", "kernel"), [("gpu", "_in_pieces"), ("tpu", "_splash"), ("cpu", "tiles")])
@pytest.mark.parametrize("mesh", ["sequence=2,model=1", "sequence=2,model=4"])
def test_devices_that_share_a_prompt_take_the_kernel_of_their_kind(monkeypatch, device, kernel, mesh):
    """KV heads take the devices of tokens where no token does; here tokens do."""
    taken = set()

    def spy(name):
        return lambda q, *_, **__: (taken.add(name), q)[1]

    monkeypatch.setattr(dispatch, "platform", lambda: device)
    monkeypatch.setattr(attention.jax, "default_backend", lambda: device)
    for name in ("_in_pieces", "_splash"):
        monkeypatch.setattr(attention, name, spy(name))
    monkeypatch.setitem(attention.OF_LAST_QUERIES, "cpu", spy("tiles"))
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16) for heads in (32, 8))
    with jax.set_mesh(named_mesh(mesh, jax.devices()[: 2 * int(mesh[-1])])):
        jax.eval_shape(lambda *x: context_parallel.attention_over_tokens(*x), q, k, k)
    assert taken == {kernel}


@pytest.mark.parametrize("parts", [2, 4])
def test_devices_share_a_prompt_by_pieces_of_a_library(monkeypatch, parts):
    """As GPUs do along "sequence", with cuDNN's part done in jnp."""
    monkeypatch.setattr(attention, "_cudnn_with_lse", with_lse)
    monkeypatch.setitem(attention.OF_LAST_QUERIES, "cpu", lambda q, k, v, **_: attention._in_pieces(q, k, v))
    q, k, v = normal(0, 2, 48, 4, 8), normal(1, 2, 48, 2, 8), normal(2, 2, 48, 2, 8)
    with jax.set_mesh(named_mesh(f"sequence={parts},model={8 // parts}")):
        got = jax.jit(lambda *x: context_parallel.attention_over_tokens(*x))(q, k, v)
    assert relative(got, dense(q, k, v)) < 1e-6


@pytest.mark.parametrize("window", [None, 1, 128, 200, 500])
@pytest.mark.parametrize("rows", [512, 1024, 640])
def test_the_mask_of_the_tpu_kernel_block_by_block(rows, window):
    mask = attention._mask(512, rows, 2, 128, window)
    ahead = rows - 512 + np.arange(512)[:, None] - np.arange(rows)
    plain = (ahead >= 0) & (ahead < (window or rows))
    for i in range(0, 512, 128):
        for j in range(0, rows, 128):
            block = slice(i, i + 128), slice(j, j + 128)
            np.testing.assert_array_equal(mask.masks[0][block], plain[block])


@pytest.mark.parametrize(
    ("backend", "dim", "soft_cap", "sinks", "why"),
    [
        ("cudnn", 96, None, False, None),
        ("cudnn", 256, None, False, "up to 128, got 256"),
        ("cudnn", 128, 50.0, False, "no soft cap of scores, got 50.0"),
        ("cudnn", 64, None, True, "no gradients of sinks"),
        ("splash", 256, 50.0, False, None),
        ("splash", 96, None, False, "multiple of 128, got 96"),
        ("splash", 128, None, True, "not given sink logits"),
    ],
)
def test_what_the_kernels_of_libraries_miss(backend, dim, soft_cap, sinks, why):
    found = attention.missing(backend, dim, soft_cap, sinks)
    assert found is None if why is None else why in found


@pytest.mark.parametrize("family", [name for name in PUBLISHED if name not in SAME_AS])
def test_kernels_take_the_heads_of_every_family_while_it_decodes(family):
    """Traced, not compiled: a kernel refuses with NotImplementedError what it cannot serve."""
    soft_cap = from_hf(PUBLISHED[family]).soft_cap
    options = {"soft_cap": soft_cap, "return_lse": True, "return_probs": False}
    for dim in HEAD_DIMS[family]:
        q, rows = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 8, dim), (2, 4, 512, dim)))
        degree, length = jax.ShapeDtypeStruct((2, 4, 512), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
        for kernel in (pallas_gpu.biased_attention, partial(pallas_tpu.biased_attention, block=128)):
            out, lse = jax.eval_shape(partial(kernel, **options), q, rows, rows, degree, length)
            assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
