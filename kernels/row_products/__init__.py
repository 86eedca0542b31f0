"""Products of few rows with large weights: those of an MLP, gated or not, and a token's output projection."""

from jaxtyping import Array, Float

from clusterkv_jax.kernels.row_products import pallas_gpu, reference
from clusterkv_jax.runtime.dispatch import dispatch

BACKENDS = {"gpu": pallas_gpu.row_products, "xla": reference.row_products}


def row_products(
    x: Float[Array, "n I"],
    weights: Float[Array, "I M"],
    onto: Float[Array, "n M"] | None = None,
    gated: Float[Array, "I M"] | None = None,
    *,
    gate: str | None = None,
    share: float = 1.0,
    backend: str | None = None,
) -> Float[Array, "n M"]:
    """`x @ weights`, or `gate(x @ weights) * (x @ gated)`, and a share of `onto` added to it, in the dtype of x.

    Args:
        x: few rows, of the dtype of the weights.
        onto: what is added to the product; None is nothing.
        share: static; how much of `onto`, where devices add up products.
        gated: what the gate multiplies; None is no gate.
        gate: static; the name of an activation in reference.GATES, where there is `gated`.

    Raises:
        ValueError: if the backend is unknown, or one of `gated` and `gate` is missing.
        NotImplementedError: if `backend` was named and cannot serve the call.
    """
    if (gated is None) != (gate is None) or gate not in {None, *reference.GATES}:
        raise ValueError(f"gate goes with gated weights and is one of {', '.join(reference.GATES)}, got {gate!r}.")
    return dispatch("row_products", BACKENDS, backend, x, weights, onto, gated, gate=gate, share=share)
