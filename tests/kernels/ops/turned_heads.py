"""Heads normalised and turned: checks, backends, broken variants, derivatives."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from clusterkv_jax.kernels.turned_heads import pallas_gpu, reference
from tests.kernels.base import changed, compiled, near, normal, tolerance

BACKENDS = {"xla": reference.turned_heads, "gpu": partial(pallas_gpu.turned_heads, interpret=True)}

# tokens, query heads, KV heads, head dim, dtype
HEAD_SHAPES = [(1, 4, 2, 128, jnp.bfloat16), (3, 6, 1, 24, jnp.float32)]


def operands(seed, tokens, heads, kv_heads, dim, dtype):
    q, k = (jnp.asarray(normal(seed + n, tokens, n, dim), dtype) for n in (heads, kv_heads))
    scales = [jnp.asarray(1 + 0.3 * normal(seed + i, dim), dtype) for i in (20, 21)]
    angles = 3 * normal(seed + 22, tokens, dim // 2)
    return q, k, *scales, *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))


def check_heads(implementation, *, examples=3):
    runs = {offset: compiled(partial(implementation, eps=0.25, offset=offset)) for offset in (0.0, 1.0)}
    for shape in HEAD_SHAPES:
        for seed in range(examples):
            for offset, run in runs.items():
                args = operands(seed, *shape)
                results = run(*args)
                q, k, q_scale, k_scale, cos, sin = (np.asarray(x, np.float64) for x in args)
                for result, x, scale in zip(results, (q, k), (q_scale, k_scale), strict=True):
                    assert result.dtype == shape[-1]
                    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.25) * (offset + scale)
                    a, b = np.split(x, 2, axis=-1)
                    turned = (a + 1j * b) * (cos + 1j * sin)[:, None]
                    near(result, np.concatenate([turned.real, turned.imag], -1), tolerance(shape[-1]), axes=2)


wrong = partial(changed, reference.turned_heads)
CHECKS = [check_heads]
BROKEN = {
    check_heads: [
        wrong("with_one_scale", k_scale=lambda a: a.q_scale),
        wrong("turned_back", sin=lambda a: -a.sin),
        wrong("without_eps", eps=0.0),
    ]
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_turned_heads_have_derivatives(op):
    args = operands(0, 1, 2, 1, 8, jnp.float32)
    check_grads(partial(op, eps=0.25, offset=0.0), args, order=1, modes=("fwd", "rev"), rtol=1e-2)
