"""The earlier path of `clusterkv_jax.checkpoints.convert`, for one release."""

from clusterkv_jax.checkpoints.convert import convert as convert
