"""From texts to texts: the request as a batch, its answers and what they took."""

from clusterkv_jax.generation.generate import generate as generate
