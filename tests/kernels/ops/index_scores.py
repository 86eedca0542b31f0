"""Products of queries and an index: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from clusterkv_jax.kernels.index_scores import pallas_gpu, reference
from tests.kernels.base import F32, changed, compiled, near, normal

BACKENDS = {
    "xla": reference.index_scores,
    "gpu": partial(pallas_gpu.index_scores, interpret=True),
    "gpu-long-tiles": partial(pallas_gpu.index_scores, tile=64, interpret=True),
}

# batch, KV heads, queries of one, entries, head dim, dtypes of queries and index
INDEX_SHAPES = [
    (2, 2, 3, 37, 24, jnp.bfloat16, jnp.float32),
    (1, 2, 4, 70, 128, jnp.float32, jnp.float32),
    (1, 1, 1, 5, 25, jnp.float32, jnp.bfloat16),
    (2, 1, 4, 70, 128, jnp.bfloat16, jnp.bfloat16),
    (1, 2, 3, 37, 24, jnp.float16, jnp.float16),
]


def check_index_scores(implementation, *, examples=3):
    run = compiled(implementation)
    for batch, heads, queries, entries, dim, q_dtype, index_dtype in INDEX_SHAPES:
        for seed in range(examples):
            q = np.asarray(normal(seed, batch, heads, queries, dim), q_dtype)
            index = np.asarray(normal(seed + 1, batch, heads, entries, dim), index_dtype)
            result = run(q, index)
            assert result.dtype == jnp.float32
            expected = np.asarray(q, np.float64) @ np.asarray(index, np.float64).swapaxes(-1, -2)
            near(result, expected, F32, axes=3)


def index_scores_of_the_first_query(q, index):
    return jnp.broadcast_to(reference.index_scores(q[:, :, :1], index), (*q.shape[:3], index.shape[2]))


wrong = partial(changed, reference.index_scores)
CHECKS = [check_index_scores]
BROKEN = {
    check_index_scores: [
        wrong("of_short_products", q=lambda a: a.q.astype(jnp.bfloat16), index=lambda a: a.index.astype(jnp.bfloat16)),
        index_scores_of_the_first_query,
    ]
}
