"""Cosine K-means of keys: the golden file, what a cluster is, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kmeans import cluster
from tests.kernels.base import near, normal
from tests.support.golden_files import golden, names


@pytest.mark.parametrize("name", names("clusterkv_case*"))
def test_labels_and_centroids_are_the_golden_ones(name):
    data, meta = golden(name)
    keys = jnp.asarray(data["k"][:, :, meta["sink"] : meta["n"]])
    centroids, labels, sizes = cluster(keys, jnp.asarray(data["init_idx"]), max_iterations=meta["iters"])
    np.testing.assert_array_equal(labels[0], data["labels"])
    np.testing.assert_array_equal(sizes[0], data["cluster_size"])
    near(centroids[0], data["centroids"], 1e-5, axes=(1, 2))


def test_stopping_early_changes_nothing_and_no_step_is_an_assignment():
    keys = jnp.asarray(normal(1, 2, 2, 60, 8), jnp.float32)
    rows = jnp.arange(4) * 7
    long, longer = cluster(keys, rows, max_iterations=60), cluster(keys, rows, max_iterations=61)
    for a, b in zip(long, longer, strict=True):
        np.testing.assert_array_equal(a, b)
    # Converged: every centroid is the mean of its keys.
    member = (long[1][..., None] == ordinals(4, 4)).astype(jnp.float32)
    means = jnp.einsum("bknc,bknd->bkcd", member, keys) / jnp.maximum(long[2], 1).astype(jnp.float32)[..., None]
    near(long[0], means, 1e-5, axes=(2, 3))
    start, labels, sizes = cluster(keys, rows, max_iterations=0)
    np.testing.assert_array_equal(start, keys[:, :, rows])
    np.testing.assert_array_equal(labels[:, :, rows], np.broadcast_to(np.arange(4), (2, 2, 4)))
    assert sizes.sum() == 2 * 2 * 60


def test_a_head_that_has_converged_stays_while_others_go_on():
    """Two heads of one array and each alone: the easy one ends after two steps, the other after many."""
    easy = np.repeat(np.eye(4, 8, dtype=np.float32), 15, axis=0)
    keys = jnp.asarray(np.stack([easy, normal(1, 60, 8)])[None], jnp.float32)
    rows, most = jnp.arange(4) * 15, 60
    result = cluster(keys, rows, max_iterations=most)
    for head in range(2):
        for one, all_heads in zip(cluster(keys[:, [head]], rows, max_iterations=most), result, strict=True):
            np.testing.assert_array_equal(one[:, 0], all_heads[:, head])
    short = cluster(keys, rows, max_iterations=2)
    np.testing.assert_array_equal(short[1][0, 0], result[1][0, 0])
    assert np.any(np.asarray(short[1][0, 1]) != np.asarray(result[1][0, 1]))


def test_an_empty_cluster_keeps_its_centroid():
    keys = jnp.asarray(normal(2, 1, 1, 20, 8), jnp.float32)
    # Of equal centroids the first gets all keys, so in the only step the second gets none.
    centroids, _, _ = cluster(keys, jnp.asarray([3, 3, 5]), max_iterations=1)
    np.testing.assert_array_equal(centroids[0, 0, 1], keys[0, 0, 3])
    assert np.any(np.asarray(centroids[0, 0, 0]) != np.asarray(keys[0, 0, 3]))


def test_rows_beyond_the_length_take_no_part():
    keys = jnp.asarray(normal(3, 2, 1, 30, 8), jnp.float32)
    length = jnp.asarray([[30], [17]])
    dirty = jnp.where(ordinals(30, 3)[..., None] < length[..., None, None], keys, jnp.nan)
    result = jax.jit(lambda keys: cluster(keys, jnp.arange(3), length=length))(dirty)
    alone = cluster(keys[1:, :, :17], jnp.arange(3))
    near(result[0][1], alone[0][0], 1e-6, axes=(1, 2))
    np.testing.assert_array_equal(result[1][1, :, :17], alone[1][0])
    np.testing.assert_array_equal(result[1][1, :, 17:], -1)
    np.testing.assert_array_equal(result[2][1], alone[2][0])


def test_what_is_no_start_is_named():
    keys = jnp.ones((1, 1, 5, 4))
    with pytest.raises(ValueError, match="rows of the keys, 0 to 4, got 5"):
        cluster(keys, jnp.asarray([0, 5]))
    with pytest.raises(ValueError, match="at least one row"):
        cluster(keys, jnp.zeros(0, jnp.int32))
    with pytest.raises(ValueError, match="max_iterations must be at least 0, got -1"):
        cluster(keys, jnp.asarray([0]), max_iterations=-1)
