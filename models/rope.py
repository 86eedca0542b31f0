"""Rotations, for callers who look for them beside the models."""

from clusterkv_jax.blocks.rope import decode as decode
from clusterkv_jax.blocks.rope import encode as encode
from clusterkv_jax.blocks.rope import frequencies as frequencies
from clusterkv_jax.blocks.rope import rotate as rotate
