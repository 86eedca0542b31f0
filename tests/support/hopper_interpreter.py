"""K-means' first guess on Hopper as a CPU interprets it: the functions of its module, for `first_guess=`."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.kmeans import first_guess_mosaic

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # before JAX 0.11
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


def _product(key, centroids, zero, i):
    block = centroids.at[zero + i][...]
    return jax.lax.dot_general(key[...], block, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@contextmanager
def _in_other_words():
    """JAX 0.10 interprets neither loads and casts of layouts nor products of transposed blocks."""
    plain = {"load": lambda ref, layout, **_: ref[...], "_product": _product}
    with (
        mock.patch.multiple(first_guess_mosaic, **plain),
        mock.patch.object(first_guess_mosaic.plgpu, "layout_cast", lambda x, layout: x),
    ):
        yield


def _first_guess(*operands):
    *operands, interpret = operands
    assert interpret
    if jax.__version_info__ >= (0, 11):
        return first_guess_mosaic.first_guess(*operands, InterpretGPUParams())
    with _in_other_words():
        return first_guess_mosaic.first_guess(*operands, InterpretGPUParams())


INTERPRETED = SimpleNamespace(
    groups=first_guess_mosaic.groups, SIZES=first_guess_mosaic.SIZES, first_guess=_first_guess
)
