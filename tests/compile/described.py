"""What programs are compiled for that hold no data: Llama-3.1-8B's shapes, and arrays on a described mesh."""

from clusterkv_jax.planning.abstract_request import array as array
from clusterkv_jax.planning.shapes import model_config

LLAMA = model_config("llama-3.1-8b")
