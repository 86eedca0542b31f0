"""Random numbers, and how far numbers are from others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int) -> jax.Array:
    """Float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def relative(got: Any, want: Any) -> float:
    """The norm of the difference, of that of what is wanted."""
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
