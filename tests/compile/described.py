"""What programs are compiled for that hold no data: Llama-3.1-8B's shapes, and arrays on a described mesh."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clusterkv_jax.models.config import ModelConfig, Rope

LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, Rope(5e5, 128))
WHOLE = PartitionSpec()


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
    """An array on the mesh, by default whole on every device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
