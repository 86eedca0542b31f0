"""Devices of a topology that is not there."""

import os
from typing import Any

import jax
from jax.experimental import topologies

from clusterkv_jax.planning.topology import Topology

# libtpu reads these once, and looks for a TPU without them.
_DESCRIBED = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def tpu_devices(name: str) -> list[Any]:
    """The devices of a topology such as "v5e:2x4", described by libtpu on a host without any.

    libtpu reads its settings from the environment once, so it is for processes of their own.

    Raises ValueError for a topology that libtpu does not know.
    """
    os.environ.update(_DESCRIBED)
    jax.config.update("jax_platforms", "cpu")
    try:
        return topologies.get_topology_desc(name, platform="tpu").devices
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"The TPU library (libtpu) describes no topology {name!r}: {reason}.") from error


def devices_of(topology: Topology) -> list[Any]:
    """A TPU's devices as libtpu describes them; in place of GPUs as many of the CPU's, which XLA_FLAGS have made."""
    if topology.chip.platform == "tpu":
        return tpu_devices(topology.name)
    jax.config.update("jax_platforms", "cpu")
    return jax.devices("cpu")[: topology.count]
