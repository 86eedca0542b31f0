"""Cosine K-means, one step: the nearest centroid of every key, and the means of what each centroid got (ClusterKV).

The loop over steps is `clusterkv_jax.kmeans.cluster`.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.kmeans import pallas_gpu, pallas_tpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.kmeans, "tpu": pallas_tpu.kmeans, "xla": reference.kmeans}


def assign(
    keys: Float[Array, "B K N D"],
    centroids: Float[Array, "B K C D"],
    length: Int[Array, "B K"] | None = None,
    count: Int[Array, "B K"] | None = None,
    before: Int[Array, "B K N"] | None = None,
    *,
    scaled: Any = None,
    backend: str | None = None,
) -> Int[Array, "B K N"]:
    """The centroid of highest cosine for every key, of equal ones the first.

    Rows at or beyond `length` keep the label that they had `before`, by default -1. Of each head's centroids the first
    `count` take part, at least one; all by default. `scaled` is `prepare_keys(keys)`, for a caller of several steps.
    Cosines in float32; the N x C of them never exist at once. A centroid or key of length 0 has cosine 0 to all.

    Raises:
        ValueError: if the backend is unknown or there is no centroid.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return _kmeans(keys, centroids, length, count, before, with_means=False, scaled=scaled, backend=backend)


def prepare_keys(keys: Float[Array, "B K N D"]) -> Any:
    """What every step of `lloyd` on these keys needs of them, to be computed once; None where that is nothing."""
    return dispatch("kmeans", {"gpu": pallas_gpu.scaled_keys, "xla": lambda _: None}, None, keys)


def lloyd(
    keys: Float[Array, "B K N D"],
    centroids: Float[Array, "B K C D"],
    length: Int[Array, "B K"] | None = None,
    count: Int[Array, "B K"] | None = None,
    before: Int[Array, "B K N"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B K C D"], Int[Array, "B K N"], Int[Array, "B K C"], Bool[Array, "B K"]]:
    """One step of Lloyd's algorithm: `assign`, then every centroid moves to the mean of its keys.

    Returns:
        centroids: f32, the means of the keys as they are (not scaled to length 1); one without keys stays.
        labels, sizes: by which the means were taken, those of the centroids given; rows at or beyond `length`, which
            keep the label that they had `before`, are in no mean.
        changed: of each head, whether any label is another than `before`.

    `options` and errors are those of `assign`.
    """
    labels, means, sizes, changed = _kmeans(keys, centroids, length, count, before, with_means=True, **options)
    return means, labels, sizes, changed


def _kmeans(keys: Array, centroids: Array, *rest: Array | None, backend: str | None = None, **options: Any):
    if not centroids.shape[2]:
        raise ValueError("K-means needs at least one centroid, got 0.")
    return dispatch("kmeans", BACKENDS, backend, keys, centroids, *rest, **{"scaled": None, **options})
