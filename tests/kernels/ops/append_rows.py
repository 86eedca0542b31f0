"""New rows behind those that there are: checks, backends, broken variants, derivatives."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.test_util import check_grads

from clusterkv_jax.kernels.append_rows import pallas_gpu, reference
from clusterkv_jax.kernels.quantised import Quantised, quantise
from tests.kernels.base import changed, compiled, drawn, lengths, normal, poisoned

BACKENDS = {
    "xla": reference.append_rows,
    "gpu": partial(pallas_gpu.append_rows, interpret=True),
    "gpu-small-tiles": partial(pallas_gpu.append_rows, tile=2, interpret=True),
}

# batch, heads, slots, tokens, head dim, dtypes of rows and slots, with positions and scores
APPEND_SHAPES = [
    (2, 3, 20, 1, 24, jnp.float32, jnp.bfloat16, True),
    (2, 2, 40, 19, 16, jnp.bfloat16, jnp.bfloat16, True),
    (1, 2, 9, 5, 8, jnp.float16, jnp.float32, False),
]


def check_append(implementation, *, shapes=APPEND_SHAPES, examples=8):
    for shape in shapes:
        check_append_of(shape, implementation, examples)


def check_append_of(shape, implementation, examples):
    batch, heads, slots, tokens, dim, row_dtype, slot_dtype, with_positions = shape
    run = compiled(implementation)

    def check(seed, share, length, before):
        length = length - before  # of a head whose first slots are elsewhere
        rng = np.random.default_rng(seed)
        real = rng.random((batch, tokens)) < share
        empty = np.arange(slots) >= length[..., None]
        padding = np.broadcast_to(~real[:, None], (batch, heads, tokens))
        rows = [np.asarray(normal(seed + i, batch, heads, tokens, dim), row_dtype) for i in (0, 1)]
        rows = [poisoned(x, ~real[:, None]) for x in rows]
        buffers = [np.asarray(normal(seed + i, batch, heads, slots, dim), slot_dtype) for i in (2, 3)]
        buffers = [poisoned(x, empty) for x in (*buffers, np.asarray(rng.integers(1, 9, empty.shape), np.float32))]
        positions = np.asarray(rng.integers(0, 99, empty.shape), np.int32) if with_positions else None
        new = np.asarray(rng.integers(100, 2**30, (batch, tokens)), np.int32)
        scores, new_scores = None, None
        if with_positions:
            scores = np.asarray(normal(seed + 4, *empty.shape), np.float32)
            new_scores = poisoned(np.asarray(normal(seed + 5, *padding.shape), np.float32), padding)
        results = run(*buffers, positions, length, *rows, new, real, scores, new_scores)
        count = 3 + 2 * with_positions
        expected = [np.array(x) for x in (*buffers, positions, scores)[:count]]
        stored: list[Any] = [x.astype(slot_dtype) for x in rows]
        stored += [np.ones(padding.shape), new[:, None], new_scores]
        for b, k, t in np.ndindex(batch, heads, tokens):
            if real[b, t] and 0 <= length[b, k] + t < slots:
                for x, y in zip(expected, stored[:count], strict=True):
                    x[b, k, length[b, k] + t] = y[b, min(k, y.shape[1] - 1), t]
        assert [x is None for x in results] == [False] * count + [True] * (5 - count)
        for x, y in zip(results[:count], expected, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), y.view(np.uint8))

    largest = slots + 3
    shares = st.sampled_from([1.0, 0.5, 0.0])
    held = lengths(batch, heads, largest, slots - tokens, slots)
    drawn(check, examples, st.integers(0, 2**16), shares, held, st.sampled_from([0, 0, 2, slots]))


def append_of_padding(*args):
    *others, real, scores, new_scores = args
    return reference.append_rows(*others, jnp.ones_like(real), scores, new_scores)


def append_of_padded_scores(*args):
    *others, scores = reference.append_rows(*args)
    return *others, None if scores is None else append_of_padding(*args)[4]


def check_append_of_codes(implementation, *, examples=4):
    """Codes and scales go where rows go: those of each kind as if they were rows."""
    for tokens, name in ((1, "int8"), (5, "float8_e4m3"), (3, "int4")):
        check_append_of_kind(tokens, name, implementation, examples)


def check_append_of_kind(tokens, name, implementation, examples):
    batch, heads, slots, dim = 2, 3, 20, 32
    run, store = compiled(implementation), compiled(partial(quantise, name=name))

    def check(seed, share, length):
        rng = np.random.default_rng(seed)
        real = rng.random((batch, tokens)) < share
        held = [store(np.asarray(normal(seed + i, batch, heads, slots, dim), np.float32)) for i in (0, 1)]
        new = [store(np.asarray(normal(seed + i, batch, heads, tokens, dim), np.float32)) for i in (2, 3)]
        degree = np.asarray(rng.integers(1, 9, (batch, heads, slots)), np.float32)
        positions = np.zeros((batch, tokens), np.int32)
        scores, new_scores = (np.asarray(normal(seed + 4, batch, heads, n), np.float32) for n in (slots, tokens))
        after = run(*held, degree, None, length, *new, positions, real, scores, new_scores)
        results = *after[:2], after[4]
        for result, old, rows in zip(results, (*held, scores), (*new, new_scores), strict=True):
            for x, before, put in zip(*map(jax.tree.leaves, (result, old, rows)), strict=True):
                expected = np.array(before)
                for b, k, t in np.ndindex(batch, heads, tokens):
                    if real[b, t] and length[b, k] + t < slots:
                        expected[b, k, length[b, k] + t] = np.asarray(put)[b, k, t]
                assert x.dtype == before.dtype
                np.testing.assert_array_equal(np.asarray(x).view(np.uint8), expected.view(np.uint8))

    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([0.5, 1.0]), lengths(batch, heads, slots, 8, slots))


def append_without_scales(keys, values, *args):
    new_keys, new_values, *rest = reference.append_rows(keys, values, *args)
    return Quantised(new_keys.codes, keys.scales), Quantised(new_values.codes, values.scales), *rest


wrong = partial(changed, reference.append_rows)
CHECKS = [check_append, check_append_of_codes]
BROKEN = {
    check_append_of_codes: [append_without_scales],
    check_append: [
        append_of_padding,
        append_of_padded_scores,
        wrong(
            "of_the_first_score",
            new_scores=lambda a: None if a.scores is None else a.new_scores[:, :1] + 0 * a.new_scores,
        ),
        wrong("behind_the_first_head", length=lambda a: a.length[:, :1] + 0 * a.length),
        wrong("over_the_last_rows", length=lambda a: jnp.minimum(a.length, a.keys.shape[2] - a.new_keys.shape[2])),
        wrong("from_the_end", length=lambda a: jnp.where(a.length < 0, a.length + a.keys.shape[2], a.length)),
        wrong("of_short_rows", new_keys=lambda a: a.new_keys.astype(jnp.float8_e5m2)),
    ],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_appending_has_derivatives(op):
    keys, values, *rows = (jnp.asarray(normal(i, 1, 2, n, 3), jnp.float32) for i, n in enumerate((5, 5, 2, 2)))
    length, real = jnp.asarray([[2, 4]]), jnp.asarray([[True, True]])

    def function(keys, values, degree, new_keys, new_values, scores, new_scores):
        slots, new = (keys, values, degree, None), (new_keys, new_values, jnp.zeros((1, 2), jnp.int32), real)
        return jax.tree.leaves(op(*slots, length, *new, scores, new_scores))

    operands = keys, values, keys[..., 0], *rows, values[..., 1], rows[0][..., 1]
    check_grads(jax.jit(function), operands, order=1, modes=("fwd", "rev"), rtol=1e-2)
