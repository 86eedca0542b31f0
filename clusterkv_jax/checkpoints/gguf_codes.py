"""Blocks of GGUF files as codes, scales and offsets: those types that the layout of `kernels.weight_codes` can hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8

from clusterkv_jax.checkpoints.repack import Coded, with_scales
from clusterkv_jax.runtime.extras import library

Blocks = UInt8[np.ndarray, "R blocks bytes"]


def gguf_codes(kind: str, blocks: Blocks) -> Coded | None:
    """Rows of blocks of this type, as `gguf.GGMLQuantizationType` calls it; None for a type that is not kept in codes.

    Scales of Q4_K and Q6_K are products of two numbers of the file, which only 32 bits hold.
    """
    read = _READERS.get(kind)
    return None if read is None else read(blocks)


def _q8_0(blocks: Blocks) -> Coded:
    return with_scales("int8", _rows(blocks[..., 2:].view(np.int8)), _halves(blocks, 0)[..., 0])


def _q4_0(blocks: Blocks) -> Coded:
    return with_scales("int4", _nibbles(blocks[..., 2:]), _halves(blocks, 0)[..., 0])


def _q4_1(blocks: Blocks) -> Coded:
    scales, least = _halves(blocks, 0)[..., 0], _halves(blocks, 2)[..., 0].astype(np.float32)
    return with_scales("int4", _nibbles(blocks[..., 4:]), scales, least + 8 * scales.astype(np.float32))


def _q4_k(blocks: Blocks) -> Coded:
    """Eight groups of 32 with scales and offsets of 6 bits; a byte has numbers of two groups that follow each other."""
    package: Any = library("gguf.quants", "Reading a GGUF file", "gguf")
    scales, least = package.Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (*blocks.shape[:2], 8)
    scale = _halves(blocks, 0).astype(np.float32) * scales.reshape(shape)
    offset = 8 * scale - _halves(blocks, 2).astype(np.float32) * least.reshape(shape)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Coded("int4", codes, _rows(scale), _rows(offset))


def _q6_k(blocks: Blocks) -> Coded:
    """Groups of 16 in 6 bits: four below, two above."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low.reshape(*blocks.shape[:2], -1) | high.reshape(*blocks.shape[:2], -1) << 4
    scale = _halves(blocks, 208).astype(np.float32) * blocks[..., 192:208].view(np.int8)
    return Coded("int8", _rows(codes.astype(np.int8) - 32), _rows(scale))


def _mxfp4(blocks: Blocks) -> Coded:
    return Coded("mxfp4", _nibbles(blocks[..., 1:]), np.ascontiguousarray(blocks[..., 0]))


_READERS: dict[str, Callable[[Blocks], Coded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _halves(blocks: Blocks, at: int) -> np.ndarray:
    """A float16 of each block, [R, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Codes of bytes whose low halves come before their high ones, in each of the last dimension's runs."""
    return _rows(np.concatenate([raw & 15, raw >> 4], axis=-1))


def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(len(x), -1)
