"""Rows by index: the recall of rows from a store of all keys or values."""

from jaxtyping import Array, Int, Shaped

from clusterkv_jax.kernels.gather_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.gather_rows, "xla": reference.gather_rows}


def gather_rows(
    source: Shaped[Array, "B K N D"],
    rows: Int[Array, "B K R"],
    near: Shaped[Array, "B K M D"] | None = None,
    place: Int[Array, "B K R"] | None = None,
    *,
    in_place: bool = False,
    backend: str | None = None,
) -> Shaped[Array, "B K R D"]:
    """Row `rows[b, k, r]` of `source[b, k]`; zeros for -1, and for any other number that is no row of the source.

    With `near`, rows of the source that are at hand: where `place[b, k, r]` is a row of `near[b, k]` it is that one,
    and nothing is read of the source. `in_place` says that a list increases, and that no row stands before its place on
    it: the result may then take the source's memory.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("gather_rows", BACKENDS, backend, source, rows, near, place, in_place=in_place)
