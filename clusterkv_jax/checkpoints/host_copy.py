"""Parameters of files in memory, in the type that devices get, each number looked at on its way."""

import math

import numpy as np

from clusterkv_jax.checkpoints.expert_stacks import Stack
from clusterkv_jax.checkpoints.safetensors import Dequantised
from clusterkv_jax.storage.digests import CHUNK, all_finite, whole
from clusterkv_jax.storage.weight_files import CheckpointError

# Numbers dequantised at once.
_PART = 2**24


def host_copy(view: np.ndarray | Stack | Dequantised, dtype: np.dtype, platform: str, where: str) -> np.ndarray:
    """What is handed to the device: the file's order is kept where the transfer transposes (faster than numpy would).

    The CPU backend adopts a buffer that is aligned and in order, so the parameter itself is the only copy there.
    Raises CheckpointError that names `where` for a number that is not finite, as stored or as `dtype`.
    """
    if isinstance(view, np.ndarray):
        copy = np.empty_like(view, dtype, subok=False) if platform != "cpu" else _aligned(view.shape, dtype)
        _fill(copy, view, where)
        return copy
    copy = _aligned(view.shape, dtype)
    if isinstance(view, Dequantised):  # a table of the whole vocabulary in float32 would be the most memory there is
        step = max(1, _PART // copy[0].size)
        for i in range(0, len(copy), step):
            _fill(copy[i : i + step], view.read((slice(i, i + step), *whole(copy.shape[1:]))), where)
        return copy
    for target, (part, place) in zip(copy, view, strict=True):
        _fill(target, part, place)
    return copy


def _fill(copy: np.ndarray, view: np.ndarray, where: str) -> None:
    order = np.argsort(copy.strides, kind="stable")[::-1]
    source, target = view.transpose(order), copy.transpose(order)
    rows = max(1, CHUNK // max(1, target[0].size))
    # Numbers are looked at while they are in the core's cache: memory is read once.
    for i in range(0, len(target), rows):
        with np.errstate(over="ignore", invalid="ignore"):
            target[i : i + rows] = source[i : i + rows]
        if not all_finite(target[i : i + rows]):
            wrong = source[i : i + rows][~np.isfinite(target[i : i + rows])].flat[0]
            raise CheckpointError(f"{where} holds {wrong}; allowed: numbers that are finite as {copy.dtype.name}.")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    buffer = np.empty(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size].view(dtype).reshape(shape)
