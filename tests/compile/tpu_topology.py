"""Devices of a TPU that is not there, for the programs that are compiled for it."""

import os
from typing import Any

import jax
from jax.experimental import topologies


def tpu_devices(name: str) -> list[Any]:
    """The devices of a topology such as "v5e:2x4", described by libtpu on a host without any.

    libtpu reads its settings from the environment once, so it is for processes of their own.
    """
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(name, platform="tpu").devices
