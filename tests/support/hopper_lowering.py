"""Kernels of Mosaic for Hopper that change an argument, lowered where jax 0.10 cannot say that they do."""

from contextlib import contextmanager, nullcontext
from unittest import mock

from clusterkv_jax.kernels.expert_block.plan import IN_PLACE


@contextmanager
def lowered():
    """Counters are read there as they are: nobody else has those of a test."""
    plan, launch = "clusterkv_jax.kernels.expert_block.plan", "clusterkv_jax.kernels.expert_block.mosaic"
    plain = mock.patch(f"{launch}._changing", lambda counters, launch, *_: launch(counters))
    with mock.patch(f"{plan}.IN_PLACE", True), nullcontext() if IN_PLACE else plain:
        yield
