"""Attention to rows by index: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.recalled_attention import pallas_gpu, recalled_attention, reference
from tests.kernels.base import changed, compiled, drawn, near, normal, poisoned, tolerance

BACKENDS = {
    "xla": reference.recalled_attention,
    "gpu": partial(pallas_gpu.recalled_attention, sizes={"span": 32}, interpret=True),
}


def check_recalled(implementation, *, examples=4):
    for each, dtype, unlisted, cap in (
        (4, jnp.float32, 0, None),
        (1, jnp.float32, 20, 0.7),
        (2, jnp.bfloat16, 3, None),
    ):
        check_recalled_of(each, dtype, unlisted, cap, implementation, examples)


def check_recalled_of(each, dtype, unlisted, soft_cap, implementation, examples):
    run = compiled(partial(implementation, unlisted=unlisted, soft_cap=soft_cap, return_lse=True))

    def check(seed, holes, length, since):
        q, keys, values = (normal(seed + i, 2, 2, n, 24) for i, n in enumerate((4, 90, 90)))
        rng = np.random.default_rng(seed)
        rows = np.where(rng.random((2, 2, each, 70)) < holes, -1, rng.integers(0, 90, (2, 2, each, 70)))
        # What is not listed is listed nowhere: from row 60 on if there is anything.
        rows = np.where(rows < 0, -1, rows % 60) if unlisted else rows
        late = since + np.arange(unlisted)
        own = {}
        unread = np.ones((2, 2, 90), bool)
        for b, k, j in np.ndindex(2, 2, each):
            named = np.concatenate([rows[b, k, j], late])
            own[b, k, j] = named[(named >= 0) & (named < length)]
            unread[b, k, own[b, k, j]] = False
        arrays = [np.asarray(x, dtype) for x in (q, keys, values)]
        dirty = (poisoned(x, unread) for x in arrays[1:])
        starts = np.full(2, since, np.int32) if unlisted else None
        end = None if length == 90 else np.full((2, 2), length, np.int32)
        out, lse = run(arrays[0], *dirty, np.asarray(rows, np.int32), starts, end)
        assert out.dtype == dtype
        q, keys, values = (np.asarray(x, np.float64) for x in arrays)
        expected, sums = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        for b, k, g in np.ndindex(2, 2, 4):
            at = own[b, k, g * each // 4]
            score = keys[b, k, at] @ q[b, k, g] / np.sqrt(24)
            score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
            weight = np.exp(score - score.max(initial=-np.inf))
            expected[b, k, g] = weight @ values[b, k, at] / max(weight.sum(), 1e-30)
            sums[b, k, g] = np.logaddexp.reduce(score, initial=-np.inf)
        near(out, expected, tolerance(dtype), axes=(2, 3))
        np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(sums))
        np.testing.assert_allclose(np.exp(lse), np.exp(sums), rtol=1e-2 if dtype == jnp.bfloat16 else 1e-4)

    holes, length, since = (
        st.sampled_from([0.3, 0.0, 1.0]),
        st.sampled_from([90, 66, 40]),
        st.sampled_from([60, 65, 89]),
    )
    drawn(check, examples, st.integers(0, 2**16), holes, length, since)


wrong = partial(changed, reference.recalled_attention)
CHECKS = [check_recalled]
BROKEN = {
    check_recalled: [
        wrong("with_the_last_row_for_none", rows=lambda a: a.rows % a.keys.shape[2]),
        wrong("beyond_its_length", length=None),
        wrong("without_the_first_unlisted_row", since=lambda a: None if a.since is None else a.since + 1),
        wrong("without_soft_cap", soft_cap=None),
    ]
}


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="multiple of its lists, got 4 and 3"):
        recalled_attention(features, features, features, jnp.zeros((1, 1, 3, 2), jnp.int32))
