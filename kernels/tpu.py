"""What block sizes on a TPU follow from: the capacity and the bandwidth of the core that is compiled for."""

from jax.experimental.pallas import tpu as pltpu

# A grid step costs about 0.35 microseconds beside its work; reading for three times as long hides that.
STEP_SECONDS = 1e-6
# Compilers grant a kernel 16 MiB of VMEM on cores that have 64 or 128; the rest is XLA's.
VMEM_SHARE = 1 / 8


def step_bytes() -> float:
    """Bytes that one grid step should read."""
    return pltpu.get_tpu_info().mem_bw_bytes_per_second * STEP_SECONDS


def vmem_budget() -> float:
    """Bytes of VMEM that the blocks and temporaries of a kernel may take."""
    return pltpu.get_tpu_info().vmem_capacity_bytes * VMEM_SHARE
