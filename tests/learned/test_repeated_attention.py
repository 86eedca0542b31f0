"""Attention of a pass in pieces that a library attends to, as a GPU takes it, against the same in XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.learned.repeated_attention import AttentionView, attend, by_library

BATCH, KV_HEADS, GROUP, DIM, ROWS, FED = 3, 2, 2, 8, 40, 23


def library(q, keys, values, lengths):
    """What cuDNN's attention returns, in plain jnp, heads first."""
    _, heads, fed, dim = q.shape
    keys, values = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (keys, values))
    logits = jnp.einsum("bhtd,bhnd->bhtn", q, keys, precision="highest") * dim**-0.5
    row, query = np.arange(keys.shape[2])[None], np.arange(fed)[:, None]
    seen = (row <= query)[None, None] if lengths is None else (row < lengths[:, None])[:, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    out = jnp.einsum("bhtn,bhnd->bhtd", jax.nn.softmax(logits, axis=-1), values, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


@pytest.mark.parametrize(("start", "sinks", "last"), [(0, 0, False), (16, 4, False), (16, 4, True), (28, 0, False)])
def test_pieces_attended_to_apart_are_one_attention(start, sinks, last):
    """Of sequences that fill the context, end in the piece, or ended before it; the first tokens of a pass are real."""
    rng = np.random.default_rng(start)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q = draw(BATCH, FED, KV_HEADS * GROUP, DIM)
    rows = tuple(draw(BATCH, KV_HEADS, count, DIM) for count in (ROWS, ROWS, FED, FED))
    counts = jnp.asarray([ROWS, start + 5, max(1, start - 3)])
    real = (np.arange(FED)[None] < 11 + counts[:, None] - start) & (counts > start)[:, None]
    below = jnp.where(real, draw(BATCH, FED), jnp.inf)
    args = q, rows, below, counts, jnp.int32(start), AttentionView(12, sinks, None, None)
    attended, best = by_library(library, *args, last=last)
    expected, best_expected = attend(*args, last=last)
    there = (start + np.arange(12)[None] < counts[:, None])[:, None, None]
    np.testing.assert_allclose(*(jnp.where(there, x, 0) for x in (best, best_expected)), rtol=1e-5, atol=1e-5)
    if last:
        assert attended is expected is None
    else:
        np.testing.assert_allclose(attended[real], expected[real], rtol=1e-4, atol=1e-5)
