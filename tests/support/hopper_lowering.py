"""Kernels of Mosaic for Hopper that change an argument, lowered where jax 0.10 cannot say that they do."""

from contextlib import contextmanager, nullcontext
from unittest import mock

from clusterkv_jax.kernels.expert_layer.plan import IN_PLACE


@contextmanager
def lowered():
    """What changes is read there as it is: nobody else has it in a test."""
    plan, launch = "clusterkv_jax.kernels.expert_layer.plan", "clusterkv_jax.kernels.expert_layer.mosaic"
    plain = mock.patch(f"{launch}._changing", lambda changed, launch, *_: (changed, launch(changed)))
    with mock.patch(f"{plan}.IN_PLACE", True), nullcontext() if IN_PLACE else plain:
        yield
