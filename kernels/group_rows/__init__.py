"""Rows by their label: a stable sort of a few label values over many rows (K-means, ClusterKV)."""

from jaxtyping import Array, Int

from clusterkv_jax.kernels.group_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.group_rows, "xla": reference.group_rows}


def group_rows(
    labels: Int[Array, "B K N"], count: int, *, backend: str | None = None
) -> tuple[Int[Array, "B K N"], Int[Array, "B K ends"]]:
    """Rows in the order of their labels, those of a label in their own order.

    Args:
        labels: i32, 0 to C - 1, or -1 for rows without one.
        count: C, static.

    Returns:
        order, starts: the rows of label c are `order[starts[c] : starts[c + 1]]`; those without one are the last.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("group_rows", BACKENDS, backend, labels, count)
