"""Quantised weights, written and dequantised by compressed-tensors and by transformers on torch: the same numbers."""

from typing import Any

import numpy as np
import pytest

from clusterkv_jax.checkpoints.safetensors import without_codes
from clusterkv_jax.models.hf_quantization import quantization
from clusterkv_jax.storage.weight_files import entries_of

torch = pytest.importorskip("torch", reason="the parity tests compare with transformers on torch: pip install torch")
from safetensors.torch import save_file  # noqa: E402

# format -> what compressed-tensors is told of the weights
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by channels": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8, packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 by channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 with zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
}


def numbers(folder: Any, parts: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """What we read of the parts of one weight."""
    save_file({f"up.{name}": x.contiguous() for name, x in parts.items()}, folder / "model.safetensors")
    (tensor,) = without_codes(entries_of(folder), quantization(config, "config.json")).values()
    return tensor.map()


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(tmp_path, name):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors")
    settings = pytest.importorskip("compressed_tensors.quantization")
    form, weights = COMPRESSED[name]
    arguments = settings.QuantizationArgs(**weights)
    scheme = settings.QuantizationScheme(targets=["Linear"], weights=arguments)
    generator = torch.Generator().manual_seed(0)
    shape = {"group": (48, 96 // weights.get("group_size", 1)), "channel": (48, 1), "tensor": (1,)}[weights["strategy"]]
    most = 448 if weights.get("type") == "float" else 2 ** (weights["num_bits"] - 1)
    state = {
        "weight": torch.randn(48, 96, generator=generator),
        "weight_scale": (2 + torch.rand(shape, generator=generator)) / most,
        "weight_zero_point": torch.zeros(shape, dtype=torch.int8),
    }
    if weights.get("symmetric") is False:
        state["weight_zero_point"] = torch.randint(-4, 4, shape, generator=generator, dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(state, scheme)
    wanted = compressor.decompress(parts, scheme)["weight"].float().numpy()
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    np.testing.assert_array_equal(numbers(tmp_path, parts, config), wanted)


def test_blocks_of_fp8(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = (100 * torch.randn(256, 384, generator=torch.Generator().manual_seed(0))).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales).numpy()
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    np.testing.assert_array_equal(numbers(tmp_path, {"weight": codes, "weight_scale_inv": scales}, config), wanted)


def test_mxfp4(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 12, 3), generator=generator, dtype=torch.uint8)
    # Theirs has the inputs first.
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).reshape(24, 96).numpy()
    found = numbers(tmp_path, {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, {"quant_method": "mxfp4"})
    np.testing.assert_array_equal(found, wanted)


def test_awq(tmp_path):
    """As compressed-tensors converts it."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    settings = pytest.importorskip("compressed_tensors.quantization")
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    scales = torch.rand(3, 48, generator=generator).to(torch.float16)
    stored = {"qweight": words(96, 6), "qzeros": words(3, 6), "scales": scales}
    converter = converters.AutoAWQConverter(group_size=32)
    parts = converter.process({f"up.{name}": x.clone() for name, x in stored.items()})
    arguments = settings.QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=False)
    scheme = settings.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    plain = compressor.decompress({name.removeprefix("up."): x for name, x in parts.items()}, scheme)
    found = numbers(tmp_path, stored, {"quant_method": "awq", "bits": 4, "version": "gemm"})
    np.testing.assert_allclose(found, plain["weight"].float().numpy(), rtol=1e-3)  # theirs are rounded to 16 bits
