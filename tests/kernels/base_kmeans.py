"""What every backend of K-means must do, and of its kernel for Hopper."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.kernels.base import F32, drawn, lengths, near, normal, poisoned

# batch, heads, keys, centroids, head dim, dtype
KMEANS_SHAPES = [
    (2, 2, 300, 5, 24, jnp.float32),
    (1, 1, 37, 12, 16, jnp.bfloat16),
    (1, 2, 300, 70, 24, jnp.bfloat16),  # more centroids than a tile of them
]
# What Hopper's first guess serves: 16 bits, D of 64 or 128, N of 64 or more and a multiple of 8. The last tile of 64
# keys overlaps the one before, or is the only one; several groups of centroids in several blocks, or one in part.
HOPPER_SHAPES = [
    (1, 2, 296, 90, 128, jnp.bfloat16),
    (2, 1, 136, 70, 64, jnp.bfloat16),
    (1, 1, 64, 5, 64, jnp.float16),
]


def check_kmeans(implementation, *, shapes=KMEANS_SHAPES, examples=6):
    for shape in shapes:
        check_kmeans_of(shape, implementation, examples)


def check_kmeans_on_hopper(implementation, *, shapes=HOPPER_SHAPES, examples=6):
    check_kmeans(implementation, shapes=shapes, examples=examples)


def check_kmeans_of(shape, implementation, examples):
    batch, heads, rows, count, dim, dtype = shape
    run = jax.jit(partial(implementation, with_means=True))

    def check(seed, apart, length, used, before):
        keys = jnp.asarray(normal(seed, batch, heads, rows, dim), dtype)
        centroids = normal(seed + 1, batch, heads, count, dim)
        half = count // 2
        if apart is not None:  # two of each
            noise = apart * normal(seed + 2, batch, heads, half, dim)
            centroids[:, :, count - half :] = centroids[:, :, :half] + noise
        real = np.arange(rows) < length[..., None]
        centroids = jnp.asarray(centroids, jnp.float32)
        used = np.full((batch, heads), used)
        used[0, 0] = count + 2  # heads may have different numbers of centroids; more than there are is all
        given = (poisoned(keys, jnp.asarray(~real)), centroids, jnp.asarray(length), jnp.asarray(used))
        old = jnp.full((batch, heads, rows), before, jnp.int32)
        labels, means, sizes, changed = run(*given, None if before == -1 else old)
        assert (labels.dtype, means.dtype, sizes.dtype) == (jnp.int32, jnp.float32, jnp.int32)
        np.testing.assert_array_equal(np.asarray(labels)[~real], before)
        np.testing.assert_array_equal(changed, np.any(labels != before, axis=-1))
        again = run(*given, labels.at[0, 0, 0].add(int(length[0, 0] > 0)))
        np.testing.assert_array_equal(again[0], labels)
        np.testing.assert_array_equal(again[3], np.arange(batch * heads).reshape(batch, heads) < (length[0, 0] > 0))
        labels = jnp.where(real, labels, -1)
        keys, centroids = (np.asarray(x, np.float64) for x in (keys, centroids))
        unit = centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)
        cosine = np.einsum("bknd,bkcd->bknc", keys / np.linalg.norm(keys, axis=-1, keepdims=True), unit)
        cosine = np.where(np.arange(count) < used[..., None, None], cosine, -np.inf)
        chosen = np.take_along_axis(cosine, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(np.where(real, chosen, 1), np.where(real, cosine.max(-1), 1), atol=F32, rtol=0)
        member = np.asarray(labels)[..., None] == np.arange(count)
        np.testing.assert_array_equal(sizes, member.sum(axis=2))
        sums = np.einsum("bknc,bknd->bkcd", member, keys) / np.maximum(sizes, 1)[..., None]
        near(means, np.where(sizes[..., None] > 0, sums, centroids), F32, axes=3)
        if apart == 0:  # the second of two equal centroids gets nothing
            assert not np.any(sizes[:, :, count - half :])

    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.sampled_from([1e-3, 0, None]),
        lengths(batch, heads, rows, count, 128, 256, rows),
        st.integers(1, count),
        st.sampled_from([-1, 0, -2]),
    )
