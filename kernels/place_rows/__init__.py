"""A layer's rows in their place among those of other layers, and their squares, since they are read anyway."""

from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.place_rows import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.place_rows, "xla": reference.place_rows}


def place_rows(
    held: Float[Array, "L B K N D"],
    squares: Float[Array, "L B K N"],
    rows: Float[Array, "B K N D"],
    lengths: Int[Array, " B"],
    place: Int[Array, ""],
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "L B K N D"], Float[Array, "L B K N"]]:
    """`held` with `rows` in one of its L places, zeros at or beyond `lengths`, and `squares` with those of the rows.

    Both may take the memory of what they were.

    Raises:
        ValueError: if the backend is unknown.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    return dispatch("place_rows", BACKENDS, backend, held, squares, rows, lengths, place)
