"""What rows weigh by their degrees, in kernels and out of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def raised(degree: Float[Array, "..."], power: float) -> Float[Array, "..."]:
    """The degrees whose logarithms are `power` times as large; those that are stored sum to the tokens seen."""
    if power == 1:
        return degree
    return jnp.where(degree > 0, degree**power, 0.0)  # 0 ** 0 is 1, and an empty slot stays empty
