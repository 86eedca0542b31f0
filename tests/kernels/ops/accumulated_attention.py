"""Attention that every row gets, summed over the queries: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.accumulated_attention import accumulated_attention, pallas_gpu, pallas_tpu, reference
from tests.kernels.base import F32, changed, compiled, drawn, lengths, near, normal, poisoned

BACKENDS = {
    "xla": partial(reference.accumulated_attention, block=48),
    "gpu": partial(pallas_gpu.accumulated_attention, interpret=True),
    "gpu-wide-blocks": partial(pallas_gpu.accumulated_attention, sizes={"tile": 32, "block": 64}, interpret=True),
    "tpu": partial(pallas_tpu.accumulated_attention, block=128, interpret=True),
    "tpu-short-last-block": partial(pallas_tpu.accumulated_attention, block=256, interpret=True),
}

# batch, query heads, KV heads, tokens, head dim, dtype
ACCUMULATED_SHAPES = [
    (2, 4, 1, 300, 24, jnp.float32),
    (2, 2, 2, 140, 128, jnp.bfloat16),
    (1, 2, 1, 5, 16, jnp.bfloat16),
]
# For the interpreter that watches for races, which is slow.
STRICT_SHAPES = {"one-head": (2, 1, 1, 300, 8, jnp.float32), "two-heads": (1, 4, 2, 140, 16, jnp.bfloat16)}


def accumulated_oracle(q, keys, lengths):
    tokens, dim = q.shape[2:]
    real = (np.arange(tokens) < lengths[:, None])[:, None, None, :, None]
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, tokens, dim)
    score = np.einsum("bkgtd,bknd->bkgtn", grouped, keys) / np.sqrt(dim)
    weight = np.where(np.tri(tokens, dtype=bool), np.exp(score - score.max(axis=-1, keepdims=True)), 0)
    return np.mean(np.sum(np.where(real, weight / weight.sum(axis=-1, keepdims=True), 0), axis=3), axis=2)


def check_accumulated(implementation, *, shapes=ACCUMULATED_SHAPES, examples=6):
    for shape in shapes:
        check_accumulated_of(shape, implementation, examples)


def check_accumulated_of(shape, implementation, examples):
    batch, heads, kv_heads, tokens, dim, dtype = shape
    run = compiled(implementation)

    def check(seed, length):
        length = length[:, 0]
        q, keys = (np.asarray(normal(seed + i, batch, n, tokens, dim), dtype) for i, n in enumerate((heads, kv_heads)))
        expected = accumulated_oracle(*(np.asarray(x, np.float64) for x in (q, keys)), length)
        beyond = (np.arange(tokens) >= length[:, None])[:, None]
        sums = run(poisoned(q, beyond), poisoned(keys, beyond), length)
        assert sums.dtype == jnp.float32
        near(sums, expected, F32, axes=2)
        assert not np.any(np.where(beyond, sums, 0))

    drawn(check, examples, st.integers(0, 2**16), lengths(batch, 1, tokens, 64, 128, 256, tokens))


wrong = partial(changed, reference.accumulated_attention)
CHECKS = [check_accumulated]
BROKEN = {
    check_accumulated: [
        wrong("without_length", lengths=lambda a: jnp.full_like(a.lengths, a.q.shape[2])),
        wrong("with_the_row_after_its_own", q=lambda a: jnp.roll(a.q, 1, axis=2)),
        wrong("of_the_first_query_heads", q=lambda a: a.q[:, : a.keys.shape[1]]),
    ]
}


@pytest.mark.wrong_arguments
def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        accumulated_attention(features, features, jnp.ones(1, jnp.int32), backend="cuda")
    with pytest.raises(ValueError, match="multiple of KV heads, got 1 and 2"):
        accumulated_attention(features, jnp.ones((1, 2, 4, 4)), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="a query and a key, got 4 and 3"):
        accumulated_attention(features, features[:, :, 1:], jnp.ones(1, jnp.int32))


def test_a_backend_of_another_device_says_what_it_needs():
    x = jnp.ones((1, 1, 4, 4))
    with pytest.raises(NotImplementedError, match="backend 'tpu' needs a TPU, not a cpu"):
        accumulated_attention(x, x, jnp.ones(1, jnp.int32), backend="tpu")


def test_the_tpu_kernel_says_what_it_does_not_serve():
    x = jnp.ones((1, 1, 200, 8))
    with pytest.raises(NotImplementedError, match="multiple of 128, got 100"):
        pallas_tpu.accumulated_attention(x, x, jnp.ones(1, jnp.int32), block=100)
