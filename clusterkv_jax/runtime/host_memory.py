"""The memory of the host as a place for arrays: where there is one apart from the device's, and how they get there."""

from typing import Any

import jax

from clusterkv_jax.runtime.dispatch import platform
from clusterkv_jax.runtime.sharding import ambient_mesh, on_one_device


def check_host_store() -> None:
    """Raise ValueError where no program reads rows from the host's memory."""
    mesh = ambient_mesh()
    if platform() not in ("cpu", "gpu"):
        raise ValueError(f'store="host" must run on a GPU or a CPU, not on a {platform()}; take store="device" there.')
    if platform() == "gpu" and mesh is not None and not on_one_device():
        raise ValueError(f'store="host" must run on one GPU, got a mesh of {mesh.size}; take store="device" there.')


def to_host(tree: Any) -> Any:
    """Arrays moved to the host's memory, inside a jit too; on a CPU they are there."""
    return jax.device_put(tree, jax.memory.Space.Host) if platform() == "gpu" else tree
