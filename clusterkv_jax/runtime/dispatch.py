"""One dispatch rule for every op: the first backend that serves the call, XLA always last."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

log = logging.getLogger("clusterkv_jax.kernels")


class LeftToXLA(NotImplementedError):
    """A call that a backend leaves to XLA, which takes it as well: nothing that a log need say."""


@dataclass(frozen=True)
class Traits:
    """What code above blocks and kernels may know of a device: it never asks for the platform.

    Attributes:
        host_driven: the host starts every launch and decides every loop, so that short launches, and conditions that
            it waits for, take longer than the work that they spare.
        merges_in_place: kernels merge rows where they lie, all heads at once.
        serial: sequences of a batch take turns, since together they take as long and need more of the caches.
        slot_tile: a cache has whole tiles of so many slots.
        page_slots: of a page of heads whose slots are known, which takes half a page a head beside them. On a TPU
            the lanes: numbers per row take no more memory there than they have.
        scratch: elements (f32) of one block of an intermediate result: 128 MiB, or what the last cache may hold.
    """

    host_driven: bool = False
    merges_in_place: bool = False
    serial: bool = False
    slot_tile: int = 1
    page_slots: int = 16
    scratch: int = 2**25


TRAITS = {
    "cpu": Traits(serial=True, scratch=2**22),
    "gpu": Traits(host_driven=True, merges_in_place=True),
    "tpu": Traits(slot_tile=16, page_slots=128),
}


def traits() -> Traits:
    """Those of what is compiled for."""
    return TRAITS[platform()]


def platform() -> str:
    """What is compiled for: the devices of the ambient mesh (they may only be described), else the default device."""
    name = _device().platform
    return "gpu" if name == "cuda" else name


def device_kind() -> str:
    """The kind of device that is compiled for, such as "TPU v5 lite" or "NVIDIA H200"."""
    return _device().device_kind


def _device() -> Any:
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return described or device or jax.local_devices()[0]


def matmul_operands(*operands: Array) -> tuple[Array, ...]:
    """The operands of a product that is accumulated in float32.

    Matrix units take 16-bit operands as they are, and products of bf16 numbers are exact in float32, so a float32 copy
    would only cost memory. The CPU has no such product; there the copies are made.
    """
    return tuple(x.astype(jnp.float32) for x in operands) if platform() == "cpu" else operands


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 operands are multiplied in float32, not in what the matrix unit prefers."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def head_after_head(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of trees of arrays [B, K, ...] without B and K, one head after the other; its results [B, K, ...]."""
    heads = operands[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(math.prod(heads), *x.shape[2:]), operands)
    outputs = jax.lax.map(lambda head: function(*head), flat)
    return jax.tree.map(lambda x: x.reshape(*heads, *x.shape[1:]), outputs)


def dispatch(
    op: str, backends: Mapping[str, Callable[..., Any]], backend: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Call `backends[backend]`, or, with backend None, the first that serves this call on this platform.

    `backends` is ordered; a backend named "tpu", "gpu" or "cpu" is tried on that platform only, and "xla" everywhere. A
    backend that cannot serve a call raises NotImplementedError and says why; asked for by name, that error reaches
    the caller, otherwise the log says once what runs in XLA instead, and why, but for what is `LeftToXLA`.
    """
    if backend is not None:
        if backend not in backends:
            raise ValueError(f"{op} has no backend {backend!r}; there are {', '.join(backends)}.")
        if backend not in ("xla", platform()):
            raise NotImplementedError(f"{op}'s backend {backend!r} needs a {backend.upper()}, not a {platform()}.")
        return backends[backend](*args, **kwargs)
    errors = []
    for name, implementation in backends.items():
        if name not in ("xla", platform()):
            continue
        try:
            return implementation(*args, **kwargs)
        except NotImplementedError as error:
            errors.append(str(error))
            if not isinstance(error, LeftToXLA):
                _log_refusal(op, name, str(error))
    raise NotImplementedError(f"No backend of {op} serves this call on {platform()}: {' '.join(errors)}")


@cache  # once for each op and reason
def _log_refusal(op: str, backend: str, reason: str) -> None:
    # A warning: only the kernel of the user's own accelerator is ever tried and refused, so the call loses speed.
    log.warning("%s falls back to XLA from its %s kernel: %s", op, backend.upper(), reason)
