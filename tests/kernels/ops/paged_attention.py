"""Attention over heads that share pages: checks, backends, broken variants, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.paged_attention import paged_attention, pallas_gpu, reference
from clusterkv_jax.kernels.quantised import CODES, dequantised, quantise
from tests.kernels.base import F32, changed, compiled, drawn, near, poisoned, tolerance
from tests.kernels.ops.biased_attention import attention_case, attention_oracle

BACKENDS = {
    "xla": reference.paged_attention,
    "gpu": partial(pallas_gpu.paged_attention, sizes={"block": 16, "span": 32}, interpret=True),
}
# batch, tokens, query heads, KV heads, pages, slots of a page, head dim, dtype, soft cap, degree power
SHAPES = [
    (2, 3, 4, 2, 9, 8, 24, jnp.float32, None, 1.0),
    (1, 20, 8, 2, 7, 16, 16, jnp.bfloat16, 0.7, 0.5),  # two tiles of queries
]


def check_paged(implementation, *, examples=5):
    for shape in SHAPES:
        check_paged_of(shape, implementation, examples)


def paged_case(shape, seed, holes):
    """Operands; some heads may have no page, and some hold more than theirs take."""
    batch, tokens, heads, kv_heads, pages, page, dim, dtype, *_ = shape
    q, keys, values, degree = attention_case((batch, tokens, heads, 1, pages * page, dim, dtype), seed, holes)
    rng = np.random.default_rng(seed)
    first = np.sort(rng.integers(0, pages + 1, (batch, kv_heads)), axis=1)
    first[:, 0] = 0
    slots = np.diff(first, append=pages) * page
    length = np.minimum(rng.integers(0, slots + 2), slots + 1)
    return q, keys[:, 0], values[:, 0], degree[:, 0], length.astype(np.int32), first.astype(np.int32)


def check_paged_of(shape, implementation, examples):
    batch, _, heads, kv_heads, pages, page, _, dtype, cap, power = shape
    run = compiled(partial(implementation, soft_cap=cap, degree_power=power))

    def check(seed, holes):
        q, keys, values, degree, length, first = paged_case(shape, seed, holes)
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        unread, group = degree == 0, heads // kv_heads
        behind = np.concatenate([first[:, 1:], np.full((batch, 1), pages)], axis=1)
        beyond = np.ones(degree.shape, bool)
        for b, k in np.ndindex(batch, kv_heads):
            start, end = first[b, k] * page, behind[b, k] * page
            end = min(end, start + length[b, k])
            beyond[b, start:end] = False
            mine = (np.asarray(x, np.float64)[b, None, None, start:end] for x in (keys, values, degree**power))
            of_head = slice(k * group, (k + 1) * group)
            asked = np.asarray(q[b : b + 1, :, of_head], np.float64)
            found = attention_oracle(asked, *mine, np.full((1, 1), end - start), cap)
            out[b, :, of_head], lse[b, :, of_head] = found[0][0], found[1][0]
        dirty = (poisoned(x, unread | beyond) for x in (keys, values))
        in_pages = (x.reshape(batch, pages, page, *x.shape[2:]) for x in (*dirty, np.where(beyond, 3.0, degree)))
        found, sums = run(
            q, *(np.asarray(x, y) for x, y in zip(in_pages, (dtype, dtype, np.float32), strict=True)), length, first
        )
        assert (found.dtype, sums.dtype) == (dtype, jnp.float32)
        near(found, out, tolerance(dtype), axes=(1, 3))
        near(sums, lse, F32, axes=1)

    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]))


wrong = partial(changed, reference.paged_attention)
CHECKS = [check_paged]
BROKEN = {
    check_paged: [
        wrong("with_the_last_head_a_page_late", first=lambda a: a.first.at[:, -1].add(1)),
        wrong("from_the_second_page", first=lambda a: a.first + 1),
        wrong("without_degrees", degree=lambda a: jnp.sign(a.degree)),
        wrong("without_soft_cap", soft_cap=None),
        wrong("without_tempering", degree_power=1.0),
    ],
}


@pytest.mark.parametrize("name", CODES)
def test_codes_are_read_as_their_numbers(name):
    shape = (2, 3, 4, 2, 9, 8, 16, jnp.float32)
    q, keys, values, degree, length, first = paged_case(shape, 5, 0.3)
    keys, values, degree = (x.reshape(2, 9, 8, *x.shape[2:]) for x in (keys, values, degree))
    rows = quantise(jnp.asarray(keys), name), quantise(jnp.asarray(values), name)
    q = jnp.asarray(q)
    expected = reference.paged_attention(q, *map(dequantised, rows), degree, length, first)
    for backend in BACKENDS.values():
        found = jax.jit(backend)(q, *rows, degree, length, first)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2)


def test_the_kernel_has_the_derivative_of_its_reference():
    shape = (1, 2, 2, 1, 3, 8, 16, jnp.float32)
    q, keys, values, degree, length, first = paged_case(shape, 3, 0.0)
    keys, values, degree = (jnp.asarray(x).reshape(1, 3, 8, *x.shape[2:]) for x in (keys, values, degree))
    q = jnp.asarray(q)
    slopes = [
        jax.grad(lambda q, run=run: jnp.sum(run(q, keys, values, degree, length, first)[0] ** 2))(q)
        for run in (partial(pallas_gpu.paged_attention, interpret=True), reference.paged_attention)
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.wrong_arguments
def test_heads_must_be_a_multiple():
    q, rows = jnp.ones((1, 1, 3, 4)), jnp.ones((1, 2, 4, 4))
    numbers = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        paged_attention(q, rows, rows, jnp.ones((1, 2, 4)), numbers, numbers)
