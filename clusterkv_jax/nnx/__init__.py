"""Flax nnx models with a compressed cache: `compressed(model, method)`; nothing of the model is copied or changed.

A model's layers run as they are written, with something else in the place of their attention: once it notes queries,
keys and values, once it puts the output where the attention would. What neither needs is dead code, which the compiler
drops. So all that reads and decodes with the library's own models does so with these.
"""

from clusterkv_jax.runtime.extras import library

library("flax.nnx", "clusterkv_jax.nnx", "flax")

# What follows imports flax, of which a sentence above says where it comes from.
from clusterkv_jax.nnx.compressed import CompressedModel, compressed  # noqa: E402
from clusterkv_jax.nnx.layouts import Layout  # noqa: E402

__all__ = ["Compressed", "CompressedModel", "Layout", "compressed"]

Compressed = CompressedModel  # its earlier name
