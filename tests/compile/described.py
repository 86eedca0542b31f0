"""What programs are compiled for that hold no data: Llama-3.1-8B's shapes, and arrays on a described mesh."""

import jax.numpy as jnp

from clusterkv_jax.planning.abstract_request import array as array
from clusterkv_jax.planning.shapes import model_config

LLAMA = model_config("llama-3.1-8b")

# Of programs for a GPU.
BATCH, HEADS, QUERY_HEADS, DIM = 1, LLAMA.num_kv_heads, LLAMA.num_heads, LLAMA.head_dim
PROMPT, RECALLED = 65536, 1024
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
