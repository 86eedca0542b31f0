"""Blocks that take their GPU backends on a CPU."""

import contextlib
import sys

import jax.numpy as jnp

from clusterkv_jax.blocks import attention_in, causal_attention, gpu, moe
from clusterkv_jax.runtime.dispatch import LeftToXLA


def take_gpu(monkeypatch, *, whole: bool):
    """Blocks ask their GPU backends first, whose ops are a CPU's; with `whole` these serve tiny models in float32.

    Attention to prompts stays the CPU's: on a GPU it is a library's, which is nowhere else.
    """

    def dispatch(op, backends, backend, *args):
        with contextlib.suppress(LeftToXLA):
            return backends["gpu"](*args)
        return backends["xla"](*args)

    for name, module in list(sys.modules.items()):
        is_block = name.startswith("clusterkv_jax.blocks.") and module is not causal_attention
        if is_block and hasattr(module, "dispatch"):
            monkeypatch.setattr(module, "dispatch", dispatch)
    monkeypatch.setattr(moe, "DTYPE", jnp.float32)
    if whole:
        monkeypatch.setattr(gpu, "WHOLE", 1)
        monkeypatch.setattr(attention_in, "WHOLE_HEAD", 1)
        monkeypatch.setattr(gpu, "SIXTEEN_BITS", (jnp.float32,))


def counted(monkeypatch, *ops):
    """The arguments of each call of these ops, given as their modules and names."""
    calls = []
    for module, name in ops:
        op = getattr(module, name)

        def count(*args, op=op, **options):
            return calls.append(args) or op(*args, **options)

        monkeypatch.setattr(module, name, count)
    return calls
