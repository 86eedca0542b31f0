"""A step of K-means: checks, backends, broken variants."""

from functools import partial
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterkv_jax.kernels.kmeans import assign, pallas_gpu, pallas_tpu, reference
from clusterkv_jax.kernels.kmeans.first_guess_triton import first_guess
from tests.kernels.base import F32, changed, compiled, drawn, lengths, near, normal, poisoned

# More groups of centroids, tiles of keys and of labels than one program has.
SMALL = {"mean_keys": 16, "mean_tiles": 2, "sort_tiles": 1, "label_held": 32, "label_turns": 1}
BACKENDS = {
    "xla": reference.kmeans,
    "gpu": partial(pallas_gpu.kmeans, interpret=True),
    "gpu-small-tiles": partial(pallas_gpu.kmeans, sizes=SMALL, interpret=True),
    "tpu": partial(pallas_tpu.kmeans, block=128, interpret=True),
}

# batch, heads, keys, centroids, head dim, dtype
KMEANS_SHAPES = [
    (2, 2, 300, 5, 24, jnp.float32),
    (1, 1, 37, 12, 16, jnp.bfloat16),
    (1, 2, 300, 70, 24, jnp.bfloat16),  # more centroids than a tile of them
]
# For the interpreter that watches for races, which is slow.
STRICT_SHAPES = {"one-head": (2, 1, 140, 3, 8, jnp.float32), "two-heads": (1, 2, 260, 17, 16, jnp.bfloat16)}


def check_kmeans(implementation, *, shapes=KMEANS_SHAPES, examples=6):
    for shape in shapes:
        check_kmeans_of(shape, implementation, examples)


def check_kmeans_of(shape, implementation, examples):
    batch, heads, rows, count, dim, dtype = shape
    run = compiled(partial(implementation, with_means=True))

    def check(seed, apart, length, active, before):
        keys = np.asarray(normal(seed, batch, heads, rows, dim), dtype)
        centroids = normal(seed + 1, batch, heads, count, dim)
        half = count // 2
        if apart is not None:  # two of each
            noise = apart * normal(seed + 2, batch, heads, half, dim)
            centroids[:, :, count - half :] = centroids[:, :, :half] + noise
        real = np.arange(rows) < length[..., None]
        centroids = np.asarray(centroids, np.float32)
        active = np.full((batch, heads), active, np.int32)
        active[0, 0] = count + 2  # heads may have different numbers of centroids; more than there are is all
        operands = (poisoned(keys, ~real), centroids, length, active)
        old = np.full((batch, heads, rows), before, np.int32)
        labels, means, sizes, changed = run(*operands, None if before == -1 else old)
        assert (labels.dtype, means.dtype, sizes.dtype) == (jnp.int32, jnp.float32, jnp.int32)
        labels, sizes = np.asarray(labels), np.asarray(sizes)
        np.testing.assert_array_equal(labels[~real], before)
        np.testing.assert_array_equal(changed, np.any(labels != before, axis=-1))
        one_other = labels.copy()
        one_other[0, 0, 0] += length[0, 0] > 0
        again = run(*operands, one_other)
        np.testing.assert_array_equal(again[0], labels)
        np.testing.assert_array_equal(again[3], np.arange(batch * heads).reshape(batch, heads) < (length[0, 0] > 0))
        labels = np.where(real, labels, -1)
        keys, centroids = (np.asarray(x, np.float64) for x in (keys, centroids))
        unit = centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)
        cosine = np.einsum("bknd,bkcd->bknc", keys / np.linalg.norm(keys, axis=-1, keepdims=True), unit)
        cosine = np.where(np.arange(count) < active[..., None, None], cosine, -np.inf)
        score = np.take_along_axis(cosine, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(np.where(real, score, 1), np.where(real, cosine.max(-1), 1), atol=F32, rtol=0)
        member = labels[..., None] == np.arange(count)
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


def kmeans_without_the_last_key(keys, centroids, length, *rest, **options):
    _, means, sizes, _ = reference.kmeans(keys, centroids, length - 1, *rest, **options)
    full, _, _, changed = reference.kmeans(keys, centroids, length, *rest, **options)
    return full, means, sizes, changed


def kmeans_by_half_precision(keys, centroids, *rest, **options):
    half = reference.unit_rows(centroids).astype(jnp.float16).astype(jnp.float32)
    labels, means, sizes, changed = reference.kmeans(keys, half, *rest, **options)
    return labels, jnp.where(sizes[..., None] > 0, means, centroids), sizes, changed


def kmeans_that_forgets_labels(keys, centroids, length, active, before, **options):
    _, *clusters, changed = reference.kmeans(keys, centroids, length, active, before, **options)
    return reference.kmeans(keys, centroids, length, active, with_means=False), *clusters, changed


def kmeans_that_never_ends(*operands, **options):
    *results, changed = reference.kmeans(*operands, **options)
    return *results, jnp.ones_like(changed)


def kmeans_sure_of_what_fp16_decides(*args, **options):
    """Takes the heads of centroids for all of them: what their tails may change is not in doubt."""

    def sure(keys, norms, heads_of, tail_norm, *rest):
        return first_guess(keys, norms, heads_of, 0 * tail_norm, *rest)

    with mock.patch.object(pallas_gpu, "first_guess", sure):
        return pallas_gpu.kmeans(*args, **options, interpret=True)


wrong = partial(changed, reference.kmeans)
CHECKS = [check_kmeans]
BROKEN = {
    check_kmeans: [
        wrong("without_tail_mask", keys=lambda a: jnp.nan_to_num(a.keys), length=None),
        kmeans_without_the_last_key,
        wrong("with_every_centroid", used=None),
        kmeans_by_half_precision,
        kmeans_that_forgets_labels,
        kmeans_that_never_ends,
        kmeans_sure_of_what_fp16_decides,
    ]
}


def test_means_do_not_hang_on_centroids_of_no_use():
    """A sequence is given as many centroids as the longest one has, and uses its own."""
    rng = np.random.default_rng(0)
    keys = np.asarray(rng.normal(size=(1, 1, 3000, 16)) * np.exp(2 * rng.normal(size=(3000, 1))), np.float32)
    centroids = np.asarray(rng.normal(size=(1, 1, 620, 16)), np.float32)
    options = {"length": None, "used": jnp.full((1, 1), 20), "with_means": True}
    step = compiled(partial(pallas_gpu.kmeans, **options, interpret=True))
    alone, among_others = step(keys, centroids[:, :, :20]), step(keys, centroids)
    np.testing.assert_array_equal(alone[0], among_others[0])
    np.testing.assert_array_equal(alone[1], among_others[1][:, :, :20])


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="at least one centroid"):
        assign(features, features[:, :, :0])


def test_a_backend_of_another_device_says_what_it_needs():
    x = jnp.ones((1, 1, 4, 4))
    with pytest.raises(NotImplementedError, match="backend 'tpu' needs a TPU, not a cpu"):
        assign(x, x, backend="tpu")


def test_the_tpu_kernel_says_what_it_does_not_serve():
    x = jnp.ones((1, 1, 200, 8))
    with pytest.raises(NotImplementedError, match="multiple of 128 or all 200 keys, got 100"):
        pallas_tpu.kmeans(x, x[:, :, :3], None, with_means=True, block=100)
