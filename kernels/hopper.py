"""What the kernels for Hopper share that are lowered through Mosaic.

A program is a warpgroup or a few of them. It moves tiles by the copy engine, and programs may count each other's steps
in memory.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

FULL = plgpu.Layout.WGMMA  # how 64 rows lie in registers, and vectors along them and along their columns
ALONG_ROWS, ALONG_COLUMNS = FULL.reduce(1), FULL.reduce(0)


def load(ref: Any, layout: Any, **options: Any) -> Array:
    """What a reference has, in registers that lie like this."""
    index = () if jax.__version_info__ >= (0, 11) else (...,)  # what JAX 0.10 asks for
    return plgpu.load(ref, *index, layout=layout, **options)


def spread(size: int) -> Any:
    """How a vector lies in the registers of all threads."""
    return plgpu.Layout.WG_STRIDED((size,), min(4, (size // 128) & -(size // 128)))


def vector(ref: Any, size: int | None = None) -> Float[Array, " n"]:
    """A vector in float32; of a reference that is itself a part of another its `size` is asked for."""
    return load(ref, spread(ref.shape[-1] if size is None else size)).astype(jnp.float32)


def signal(counters: Any, which: Any) -> None:
    """Count this program among those that are done with a step; they then see what its threads have written."""
    plgpu.commit_smem()

    def add(context: Any, counter: Any) -> None:
        del context
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(add)
    inline(counters.at[which])


def wait(counters: Any, which: Any, count: int) -> None:
    """Go on when so many programs are done with a step. All of them must run at once."""

    def until(context: Any, counter: Any) -> None:
        del context
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(count, decrement=False, memory_scope="gpu")

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(until)
    inline(counters.at[which])
