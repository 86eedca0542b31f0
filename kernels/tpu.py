"""What block sizes on a TPU follow from: the capacity and the bandwidth of the core that is compiled for."""

from jax.experimental.pallas import tpu as pltpu

# A grid step costs about a third of a microsecond beside its work; a whole one of work hides that.
STEP_SECONDS = 1e-6
# The compiler grants a kernel 16 MiB of the 128 that most cores have, and keeps the rest for itself.
VMEM_SHARE = 1 / 8


def step_bytes() -> float:
    """Bytes that one grid step should read."""
    return pltpu.get_tpu_info().mem_bw_bytes_per_second * STEP_SECONDS


def step_flops() -> float:
    """Operations on bf16 that one grid step should do."""
    return pltpu.get_tpu_info().bf16_ops_per_second * STEP_SECONDS


def vmem_budget() -> float:
    """Bytes of VMEM that the blocks and temporaries of a kernel may take."""
    return pltpu.get_tpu_info().vmem_capacity_bytes * VMEM_SHARE
