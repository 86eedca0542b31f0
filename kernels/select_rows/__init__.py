"""Which rows to recall: those of the best clusters, until there is no room (ClusterKV section 4.3)."""

from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.kernels.select_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.select_rows, "xla": reference.select_rows}


def select_rows(
    scores: Float[Array, "B K J C"],
    sizes: Int[Array, "B K C"],
    starts: Int[Array, "B K C"],
    order: Int[Array, "B K N"] | None,
    room: Int[Array, " B"],
    kept: Int[Array, "B K J count"] | None = None,
    active: Bool[Array, " B"] | None = None,
    *,
    count: int,
    sinks: int = 0,
    backend: str | None = None,
) -> Int[Array, "B K J count"]:
    """The first `sinks` rows and those of the clusters of highest score, of equal ones the first, `room` rows together.

    Args:
        scores: f32, of every cluster for each of J selections per KV head.
        sizes, starts: cluster c holds the rows `order[starts[c] : starts[c] + sizes[c]]`; one of size 0 is none.
        order: rows by cluster; None where they stand so already.
        room: rows wanted in each sequence; sinks come whatever the room is, and no more than `count` rows.
        kept, active: sequences that are not active get what is kept of an earlier call; by default all are active.
        count: static.
        sinks: static; rows before these are in no cluster.

    Returns:
        rows: sinks, then cluster after cluster, in any order of clusters; -1 behind the last one. The cluster of lowest
        score, of equal ones the last, may be cut at its end.

    Raises:
        ValueError: if the backend is unknown, or only one of `kept` and `active` is given.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if (kept is None) != (active is None):
        raise ValueError("kept and active must be given together.")
    args = (scores, sizes, starts, order, room, kept, active)
    return dispatch("select_rows", BACKENDS, backend, *args, count=count, sinks=sinks)
