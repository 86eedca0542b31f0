"""Queries, keys and values of few tokens: checks, backends, broken variants, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.head_products import pallas_gpu, reference
from tests.kernels.base import changed, compiled, near, normal, tolerance

BACKENDS = {
    "xla": reference.head_products,
    "gpu": partial(pallas_gpu.head_products, sizes={"block": 16, "depth": 16, "numbers": 512}, interpret=True),
}

# tokens, inputs, query heads, KV heads, head dim, dtype
SHAPES = [(1, 96, 4, 2, 64, jnp.bfloat16), (5, 64, 3, 1, 32, jnp.float16), (16, 32, 2, 2, 32, jnp.bfloat16)]


OPTIONS = {"eps": 0.25, "offset": 1.0}


def operands(seed, tokens, inputs, heads, kv_heads, size, dtype):
    counts = heads, kv_heads, kv_heads
    x = jnp.asarray(normal(seed, tokens, inputs), dtype)
    weights = tuple(jnp.asarray(normal(seed + 10 + i, n, size, inputs), dtype) for i, n in enumerate(counts))
    biases = tuple(jnp.asarray(5 * normal(seed + 20 + i, n, size), dtype) for i, n in enumerate(counts))
    angle = normal(seed + 30, tokens, size // 2)
    return x, weights, biases, tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))


def exact(x, weights, biases, angles, scale=None):
    def wide(y):
        return np.asarray(y, np.float64)

    if scale is not None:
        norm = np.sqrt(np.mean(wide(x) ** 2, axis=1, keepdims=True) + OPTIONS["eps"])
        x = wide(x) / norm * (OPTIONS["offset"] + wide(scale))
    heads = [np.einsum("nm,hdm->nhd", wide(x), wide(w)) for w in weights]
    if biases is not None:
        heads = [y + wide(bias) for y, bias in zip(heads, biases, strict=True)]
    if angles is not None:
        turn = (wide(angles[0]) + 1j * wide(angles[1]))[:, None]
        for number in range(2):
            first, second = np.split(heads[number], 2, axis=-1)
            turned = (first + 1j * second) * turn
            heads[number] = np.concatenate([turned.real, turned.imag], axis=-1)
    return heads


def check_heads(implementation, *, examples=2):
    run = compiled(implementation)
    for *shape, dtype in SHAPES:
        for seed in range(examples):
            x, weights, biases, angles = operands(seed, *shape, dtype)
            for bias, angle in ((None, angles), (biases, angles), (biases, None)):
                *results, scores = run(x, weights, bias, angle)
                assert scores is None
                for result, want in zip(results, exact(x, weights, bias, angle), strict=True):
                    assert (result.dtype, result.shape) == (dtype, want.shape)
                    near(result, want, tolerance(dtype), axes=2)


def check_norm(implementation, *, examples=2):
    """Of one token, of several in XLA."""
    run = compiled(partial(implementation, **OPTIONS))
    for *shape, dtype in [*SHAPES[:1], (1, 72, 2, 1, 36, jnp.float16)]:
        for seed in range(examples):
            x, weights, biases, angles = operands(seed, *shape, dtype)
            scale = jnp.asarray(0.3 * normal(seed + 40, x.shape[1]), dtype)
            for bias in (None, biases):
                *results, _ = run(x, weights, bias, angles, scale)
                for result, want in zip(results, exact(x, weights, bias, angles, scale), strict=True):
                    near(result, want, 2 * tolerance(dtype), axes=2)


def check_scores(implementation, *, examples=2):
    """Of one token as it is rounded, of several in XLA; heads are as without them. No block divides their number."""
    run = compiled(partial(implementation, **OPTIONS))
    for *shape, dtype in [*SHAPES[:1], (1, 72, 2, 1, 36, jnp.float16)]:
        for seed in range(examples):
            x, weights, *_ = operands(seed, *shape, dtype)
            surrogate = jnp.asarray(normal(seed + 50, 11, x.shape[1]), jnp.float32), jnp.arange(11, dtype=jnp.float32)
            ones = jnp.eye(len(x[0]), dtype=dtype)[None], *weights[1:]
            for scale in (None, jnp.asarray(0.3 * normal(seed + 40, x.shape[1]), dtype)):
                *heads, scores = run(x, weights, None, None, scale, surrogate)
                for got, want in zip(heads, run(x, weights, None, None, scale)[:3], strict=True):
                    near(got, want, 0, axes=2)
                entering = np.asarray(run(x, ones, None, None, scale)[0][:, 0], np.float64)
                want = entering @ np.asarray(surrogate[0], np.float64).T + np.arange(11)
                assert scores.dtype == jnp.float32
                near(scores, want, tolerance(jnp.float32), axes=1)


def norm_behind(x, weights, biases=None, angles=None, scale=None, **options):
    *heads, _ = reference.head_products(x, weights, biases, angles)
    return *(heads if scale is None else (y / jnp.sqrt(jnp.mean(y**2)) for y in heads)), None


def values_turned(x, weights, biases=None, angles=None):
    q, k, *_ = reference.head_products(x, weights, biases, angles)
    return q, k, reference.head_products(x, weights[::-1], None if biases is None else biases[::-1], angles)[0], None


def biases_behind(x, weights, biases=None, angles=None):
    *heads, _ = reference.head_products(x, weights, None, angles)
    return *(heads if biases is None else (y + bias[None] for y, bias in zip(heads, biases, strict=True))), None


def heads_in_turns(x, weights, biases=None, angles=None):
    q, *others = reference.head_products(x, weights, biases, angles)
    return jnp.roll(q, 1, axis=1), *others


def scores_before_the_norm(x, weights, biases=None, angles=None, scale=None, surrogate=None, **options):
    *heads, _ = reference.head_products(x, weights, biases, angles, scale, **options)
    return *heads, reference.head_products(x, weights, None, None, None, surrogate)[3]


def scores_rounded(*args, **options):
    *heads, scores = reference.head_products(*args, **options)
    return *heads, None if scores is None else scores.astype(jnp.bfloat16).astype(jnp.float32)


wrong = partial(changed, reference.head_products)
CHECKS = [check_heads, check_norm, check_scores]
BROKEN = {
    check_heads: [
        wrong("turned_back", angles=lambda a: None if a.angles is None else (a.angles[0], -a.angles[1])),
        values_turned,
        biases_behind,
        heads_in_turns,
    ],
    check_norm: [wrong("without_eps", eps=0.0), norm_behind],
    check_scores: [
        scores_before_the_norm,
        scores_rounded,
        wrong(
            "scores_without_bias",
            surrogate=lambda a: None if a.surrogate is None else (a.surrogate[0], jnp.zeros_like(a.surrogate[1])),
        ),
    ],
}


def test_head_products_have_derivatives():
    """Those of the definition, also of the kernel."""
    operand = operands(0, 2, 32, 2, 1, 32, jnp.bfloat16)
    grads = [
        jax.grad(lambda *args, op=op: sum(jnp.sum(y.astype(jnp.float32)) for y in op(*args)[:3]), argnums=(0, 1, 2))(
            *operand
        )
        for op in BACKENDS.values()
    ]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    ("tokens", "inputs", "size", "dtype", "message"),
    [
        (17, 64, 32, jnp.bfloat16, "up to 16 rows"),
        (2, 64, 32, jnp.float32, "got 2 of float32"),
        (2, 8, 32, jnp.bfloat16, "blocks of 16, got 8 and 16, 16, 16"),
        (2, 33, 32, jnp.bfloat16, "blocks of 16, got 33 and 16, 16, 16"),
        (2, 24, 32, jnp.bfloat16, "blocks of 16, got 24 and 16, 16, 16"),
        (2, 64, 24, jnp.bfloat16, "blocks of 16, got 64 and 12, 12, 12"),
    ],
)
def test_the_kernel_refuses_what_fills_no_block(tokens, inputs, size, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        pallas_gpu.head_products(*operands(0, tokens, inputs, 2, 1, size, dtype), interpret=True)


def test_the_kernel_normalises_and_scores_one_token():
    x, weights, *_ = operands(0, 2, 64, 2, 1, 32, jnp.bfloat16)
    for more in ({"scale": jnp.ones(64, jnp.bfloat16)}, {"surrogate": (jnp.ones((4, 64)), jnp.ones(4))}):
        with pytest.raises(NotImplementedError, match=r"normalises and scores one token of up to 16384, got \(2, 64\)"):
            pallas_gpu.head_products(x, weights, **more, interpret=True)
