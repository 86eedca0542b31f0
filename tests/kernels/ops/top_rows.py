"""The highest scores: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from clusterkv_jax.kernels.top_rows import pallas_gpu, reference
from tests.kernels.base import changed, compiled, drawn

BACKENDS = {"xla": reference.top_rows, "gpu": partial(pallas_gpu.top_rows, interpret=True)}

# batch, heads, scores; the last are more than a program holds at once
SCORE_SHAPES = [(2, 3, 1), (2, 3, 70), (1, 2, 33000)]


def check_top_rows(implementation, *, examples=8):
    for shape in SCORE_SHAPES:
        check_top_rows_of(shape, implementation, examples)


def check_top_rows_of(shape, implementation, examples):
    run = compiled(implementation)

    def check(seed, levels, share, of_heads):
        """Equal scores at the limit, 0 and -0, numbers that are none, all and more than there are, none."""
        rng = np.random.default_rng(seed)
        score = rng.normal(size=shape) if levels is None else rng.choice(rng.normal(size=levels), size=shape)
        score[rng.random(shape) < 0.1] = 0.0
        score[rng.random(shape) < 0.1] *= -0.0
        score[rng.random(shape) < 0.2] = -np.inf
        score[rng.random(shape) < 0.05] = np.nan
        score = np.asarray(score, np.float32)
        count = np.asarray(share * rng.integers(0, shape[2] + 2, shape[:2] if of_heads else shape[:1]), np.int32)
        mask = np.asarray(run(jnp.asarray(score), jnp.asarray(count)))
        assert mask.dtype == bool
        limits = np.broadcast_to(count if of_heads else count[:, None], shape[:2])
        for at in np.ndindex(*shape[:2]):
            real = np.flatnonzero(score[at] > -np.inf)
            best = real[np.argsort(-score[at][real], kind="stable")][: limits[at]]
            assert np.flatnonzero(mask[at]).tolist() == sorted(best.tolist())

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.sampled_from([None, 1, 3]),
        st.sampled_from([0.0, 0.1, 1.0]),
        st.booleans(),
    )


def rows_that_need_more(score, count):
    """All that reach the limit."""
    exact = reference.top_rows(score, count)
    least = jnp.min(jnp.where(exact, score, jnp.inf), axis=-1, keepdims=True)
    return exact | (score == least)


wrong = partial(changed, reference.top_rows)
CHECKS = [check_top_rows]
BROKEN = {
    check_top_rows: [
        rows_that_need_more,
        wrong("rows_of_the_first_sequence", count=lambda a: a.count[:1] + 0 * a.count),
        wrong("rows_without_a_sign", score=lambda a: jnp.where(a.score < 0, -a.score, a.score)),
    ]
}
