"""Weights as quantised checkpoints store them, and the numbers that they then stand for: formulas without a table."""

from typing import Any

import ml_dtypes
import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of every number."""
    return np.kron(scales, np.ones(block, np.float32))[: shape[0], : shape[1]]


def _random(x: np.ndarray, block: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of different sizes for the blocks of a weight, as bfloat16 holds them, and one for every number."""
    grid = -(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])
    scales = np.random.default_rng(seed).uniform(0.01, 0.05, grid).astype(ml_dtypes.bfloat16).astype(np.float32)
    return scales, _spread(scales, block, x.shape)


def fp8(name: str, x: np.ndarray, block: tuple[int, int] | None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    scales, spread = _random(x, block or x.shape, len(name))
    codes = (x / spread).astype(ml_dtypes.float8_e4m3fn)
    stored = scales if block else scales.reshape(())
    parts = {name: codes, f"{name}_scale_inv" if block else f"{name}_scale": stored}
    return parts, codes.astype(np.float32) * spread


def fp8_channels(name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    scales, spread = _random(x, (1, x.shape[1]), len(name))
    codes = (x / spread).astype(ml_dtypes.float8_e4m3fn)
    # What activations and caches are scaled by belongs to no weight.
    others = {name.replace("weight", part): np.ones(1, np.float32) for part in ("input_scale", "k_scale", "v_scale")}
    parts = {name: codes, f"{name}_scale": scales.astype(ml_dtypes.bfloat16)} | others
    return parts, codes.astype(np.float32) * spread


def int8(name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    scales, spread = _random(x, (1, x.shape[1]), len(name))
    codes = np.clip(np.rint(x / spread), -128, 127).astype(np.int8)
    return {name: codes, f"{name}_scale": scales.astype(ml_dtypes.bfloat16)}, codes.astype(np.float32) * spread


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Numbers without a sign as 32-bit ones, the first in the lowest bits."""
    per = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // per] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per))
    return words.view(np.int32)


def packed(
    name: str, x: np.ndarray, bits: int, group: int, symmetric: bool = True
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    scales, spread = _random(x, (1, group), len(name))
    scales, spread, most = scales * 2 ** (8 - bits), spread * 2 ** (8 - bits), 2 ** (bits - 1)
    zeros = np.random.default_rng(5).integers(-most, most, scales.shape) // 2 * (not symmetric)
    codes = np.clip(np.rint(x / spread) + _spread(zeros, (1, group), x.shape), -most, most - 1).astype(np.int64)
    parts = {
        f"{name}_packed": _pack(codes + most, bits),
        f"{name}_scale": scales.astype(ml_dtypes.bfloat16),
        f"{name}_shape": np.array(x.shape, np.int64),
    }
    if not symmetric:
        parts[f"{name}_zero_point"] = np.ascontiguousarray(_pack((zeros + most).T, bits).T)
    return parts, ((codes - _spread(zeros, (1, group), x.shape)) * spread).astype(np.float32)


def mxfp4(name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The nearest of 16 numbers by the group's power of two; two in a byte, the first in its low half."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    powers = np.floor(np.log2(np.abs(groups).max(axis=-1))).astype(np.int64) - 2
    levels = np.array(E2M1 + [-number for number in E2M1])
    ratios = groups / 2.0 ** powers[..., None]
    codes = np.argmin(np.abs(ratios[..., None] - levels), axis=-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    numbers = (levels[codes] * 2.0 ** powers[..., None]).reshape(len(x), -1)
    return {f"{name}_blocks": blocks, f"{name}_scales": (powers + 127).astype(np.uint8)}, numbers.astype(np.float32)


def words(
    name: str, x: np.ndarray, method: str, group: int, below: int = 1, bits: int = 4, shuffle: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As GPTQ and AWQ pack codes; inputs may be in groups of any order."""
    draw = np.random.default_rng(len(name))
    inputs, order = x.shape[1], np.arange(x.shape[1])
    groups = (draw.permutation(order) if shuffle else order) // group
    scales = draw.uniform(0.01, 0.05, (inputs // group, len(x))).astype(np.float16)
    scales = (scales * 2.0 ** (4 - bits)).astype(np.float16)
    zeros = draw.integers(1, 2**bits, scales.shape)
    spread = scales.astype(np.float32)[groups]
    codes = np.clip(np.rint(x.T / spread) + zeros[groups], 0, 2**bits - 1).astype(np.int64)
    base, places = name.removesuffix("weight"), [0, 2, 4, 6, 1, 3, 5, 7]
    if method == "awq":
        codes_of = [y.reshape(len(y), -1, 8)[:, :, places].reshape(len(y), -1) for y in (codes, zeros)]
        packed_codes, packed_zeros = (_pack(y, 4) for y in codes_of)
    else:
        packed_codes, packed_zeros = _pack(codes.T, bits).T, _pack((zeros - below) % 2**bits, bits)
    parts = {"qweight": packed_codes, "qzeros": packed_zeros, "scales": scales}
    if method == "gptq":
        parts["g_idx"] = groups.astype(np.int32)
    numbers = ((codes - zeros[groups]).astype(np.float32) * spread).T
    return {base + part: np.ascontiguousarray(y) for part, y in parts.items()}, np.ascontiguousarray(numbers)


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }


# name -> (quantization_config, how a weight is stored)
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8 by blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]},
        lambda name, x: fp8(name, x, (16, 24)),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda name, x: fp8(name, x, None)),
    "float-quantized": (_compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channels),
    "int-quantized": (_compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    "pack-quantized int4": (
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16),
        lambda name, x: packed(name, x, 4, 16),
    ),
    "pack-quantized int8": (
        _compressed("pack-quantized", num_bits=8, strategy="channel"),
        lambda name, x: packed(name, x, 8, x.shape[1]),
    ),
    "with zero points": (
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=8, symmetric=False),
        lambda name, x: packed(name, x, 4, 8, symmetric=False),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda name, x: words(name, x, "gptq", 32)),
    "gptq int8": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda name, x: words(name, x, "gptq", 32, below=0, bits=8),
    ),
    "gptq by activations": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda name, x: words(name, x, "gptq", 16, shuffle=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, lambda name, x: words(name, x, "awq", 16)),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
}


def quantised(
    format: str, tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`quantization_config`, the tensors with every projection quantised, and what they stand for."""
    config, store = FORMATS[format]
    coded, plain = {}, {}
    for name, tensor in tensors.items():
        if "_proj." in name:
            parts, plain[name] = store(name, tensor)
            coded |= parts
        else:
            coded[name] = plain[name] = tensor
    return config, coded, plain
