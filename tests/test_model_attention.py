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

from clusterkv_jax.models import causal_attention as attention


def relative(got: Any, want: Any) -> float:
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


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
def test_sinks_are_rows_without_values(monkeypatch, window):
    """Forwards, of the last queries, and backwards: as a first key that all see, of value zero."""
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    q, k, v, sinks = normal(0, 2, 70, 4, 8), normal(1, 2, 70, 2, 8), normal(2, 2, 70, 2, 8), normal(3, 4)

    def definition(q: jax.Array, sinks: jax.Array, offset: int = 0) -> jax.Array:
        groups = [jnp.repeat(x, 2, axis=2) for x in (k, v)]
        ahead = offset + np.arange(q.shape[1])[:, None] - np.arange(70)
        scores = jnp.einsum("bthd,bnhd->bhtn", q, groups[0]) / math.sqrt(8)
        scores = jnp.where((ahead >= 0) & (ahead < (window or 70)), scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
        return jnp.einsum("bhtn,bnhd->bthd", weights, groups[1])

    whole = lambda q, sinks: attention.causal_attention(q, k, v, window=window, sink_logits=sinks)  # noqa: E731
    assert relative(jax.jit(whole)(q, sinks), definition(q, sinks)) < 1e-6
    last = partial(attention.last_queries_attention, window=window, backend="xla", sink_logits=sinks)
    assert relative(jax.jit(last)(q[:, 50:], k, v), definition(q[:, 50:], sinks, 50)) < 1e-6
    gradients = [jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1)))(q, sinks) for f in (whole, definition)]
    assert relative(gradients[0][0], gradients[1][0]) < 1e-5
    assert relative(gradients[0][1], gradients[1][1]) < 1e-5
    with pytest.raises(ValueError, match="it has no gradients of sinks" if jax.default_backend() == "gpu" else "gpu"):
        attention.causal_attention(q, k, v, sink_logits=sinks, backend="cudnn")


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(1, 4, 4), (5, 6, 2), (37, 3, 1), (37, 4, 4), (130, 6, 2)])
def test_causal_attention(monkeypatch, length, heads, kv_heads):
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    q, k, v = normal(0, 2, length, heads, 8), normal(1, 2, length, kv_heads, 8), normal(2, 2, length, kv_heads, 8)
    got = jax.jit(attention.causal_attention)(q, k, v)
    assert relative(got, dense(q, k, v)) < 1e-6


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (5, 0.7), (16, None), (40, 0.7), (70, None), (80, 0.7)])
def test_windows_and_soft_caps(monkeypatch, window, soft_cap):
    """Of all queries, of the last ones of a prompt, and backwards."""
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    q, k, v = normal(0, 2, 70, 4, 8), normal(1, 2, 70, 2, 8), normal(2, 2, 70, 2, 8)
    options: Any = {"window": window, "soft_cap": soft_cap}
    whole = jax.jit(partial(attention.causal_attention, **options))
    assert relative(whole(q, k, v), dense(q, k, v, **options)) < 1e-6
    last = jax.jit(partial(attention.last_queries_attention, **options, backend="xla"))
    assert relative(last(q[:, 50:], k, v), dense(q[:, 50:], k, v, offset=50, **options)) < 1e-6
    gradient = lambda function: jax.jit(jax.grad(lambda x: jnp.sum(function(q, x, x + v) ** 2)))(k)  # noqa: E731
    assert relative(gradient(whole), gradient(partial(dense, **options))) < 1e-5


def test_a_window_costs_as_much_for_each_token():
    """No block of queries looks at more keys than it can see together."""

    def keys_of_a_block(length: int, window: int | None) -> int:
        shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        lowered = jax.jit(partial(attention.causal_attention, window=window)).lower(shape, shape, shape)
        return max(map(int, re.findall(r"x256x(\d+)xf32", lowered.as_text())))

    assert keys_of_a_block(8192, 512) == keys_of_a_block(4096, 512) == 256 + 511
    assert keys_of_a_block(8192, None) > 4096


def test_rows_of_a_batch_may_be_taken_one_after_the_other(monkeypatch):
    """As on a CPU, whose cache holds the scores of few."""
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    operands = normal(0, 5, 70, 4, 8), normal(1, 5, 70, 2, 8), normal(2, 5, 70, 2, 8)
    together = jax.jit(lambda *x: attention.causal_attention(*x)).lower(*operands)
    monkeypatch.setitem(attention.SCORES_AT_ONCE, "cpu", 2 * 4 * 70 * 16)  # two rows at once, one is left
    parts = jax.jit(lambda *x: attention.causal_attention(*x)).lower(*operands)
    scores_of_five = "tensor<5x2x2x9x17xf32>"  # the first 9 of 17 queries
    assert scores_of_five in together.as_text()
    assert scores_of_five not in parts.as_text()
    assert relative(parts.compile()(*operands), together.compile()(*operands)) < 1e-6


def test_gradients_of_attention(monkeypatch):
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 8)
    operands = normal(0, 1, 40, 4, 8), normal(1, 1, 40, 2, 8), normal(2, 1, 40, 2, 8)
    weight = normal(3, 1, 40, 4, 8)

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: jnp.sum(function(*x) * weight), argnums=(0, 1, 2)))(*operands)

    for got, want in zip(gradients(attention.causal_attention), gradients(dense), strict=True):
        assert relative(got, want) < 1e-5


def test_scores_of_all_queries_never_exist_at_once():
    shape = jax.ShapeDtypeStruct((1, 8192, 4, 16), jnp.float32)
    lowered = jax.jit(jax.grad(lambda q, k, v: jnp.sum(attention.causal_attention(q, k, v)))).lower(shape, shape, shape)
    text = lowered.as_text()
    assert "x8192x" in text
    assert "8192x8192" not in text


@pytest.mark.parametrize(
    ("backend", "message"),
    [("cudnn", "needs a gpu"), ("splash", "needs a tpu"), ("flash", "allowed: xla, cudnn, splash")],
)
def test_a_backend_that_cannot_serve_says_why(backend, message):
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises(ValueError, match=message):
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
