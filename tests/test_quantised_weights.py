"""Checkpoints in fp8, int8, int4 and MXFP4: a model of them is the model of the numbers that they stand for."""

import json
from functools import cache, partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from clusterkv_jax.checkpoints import dequantize, safetensors
from clusterkv_jax.checkpoints.loading import CheckpointError, load_config
from clusterkv_jax.checkpoints.loading import load as load_codes
from clusterkv_jax.models import registry
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.models.hf_quantization import quantization
from clusterkv_jax.storage.weight_files import entries_of
from tests.support.checkpoint_files import FAMILIES, GPT_OSS, LLAMA, random_tensors, same, write
from tests.support.quantised_files import E2M1, FORMATS, mxfp4, quantised

# Wide enough for several groups of 32, and no multiple of the blocks of 16 by 24.
SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
load = partial(load_codes, weights="dequantised")
UP = "model.layers.1.mlp.up_proj.weight"


@cache
def tensors():
    return random_tensors(SMALL)


def pair(tmp_path, format, shards=0, published=SMALL, source=None):
    """A quantised folder, and one with the numbers that it stands for."""
    config, coded, plain = quantised(format, tensors() if source is None else source)
    folder = write(tmp_path / "coded", {**published, "quantization_config": config}, coded, shards)
    return folder, write(tmp_path / "plain", published, plain)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_model_of_the_numbers(tmp_path, format):
    folder, plain = pair(tmp_path, format, shards=2)
    found, wanted = load(folder), load(plain)
    assert same(found.params, wanted.params)
    assert found.config.weights == wanted.config.weights
    tokens = np.arange(20, dtype=np.int32)[None]
    logits, others = (jax.jit(forward, static_argnums=1)(m.params, m.config, tokens) for m in (found, wanted))
    np.testing.assert_array_equal(logits, others)


@pytest.mark.parametrize("format", FORMATS)
def test_devices_dequantise_their_part(tmp_path, format):
    folder, plain = pair(tmp_path, format)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    found = load(folder, mesh=mesh, dtype="bfloat16")
    assert same(jax.device_get(found.params), load(plain, dtype="bfloat16").params)
    assert found.params["layers"][0]["mlp"]["down"].addressable_shards[0].data.shape == (24, 64)


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_fused_projections_and_experts(tmp_path, family):
    source = random_tensors(FAMILIES[family])
    folder, plain = pair(tmp_path, "fp8 by blocks", published=FAMILIES[family], source=source)
    assert same(load(folder).params, load(plain).params)


@cache
def gpt_oss():
    """Tensors with experts in MXFP4, and what they stand for with each one's inputs first."""
    source = random_tensors(GPT_OSS)
    coded, plain = dict(source), dict(source)
    for name in (name for name in source if name.endswith(("gate_up_proj", "down_proj"))):
        parts, numbers = zip(*(mxfp4(name, np.ascontiguousarray(expert.T)) for expert in coded.pop(name)), strict=True)
        coded |= {part: np.stack([of[part] for of in parts]) for part in parts[0]}
        plain[name] = np.ascontiguousarray(np.stack(numbers).swapaxes(1, 2))
    return coded, plain


def test_gpt_oss_as_published(tmp_path):
    coded, plain = gpt_oss()
    assert coded["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (4, 64, 2, 16)
    assert coded["model.layers.0.mlp.experts.down_proj_scales"].shape == (4, 64, 1)
    published = {**GPT_OSS, "quantization_config": FORMATS["mxfp4"][0]}
    folder, other = write(tmp_path / "coded", published, coded, 2), write(tmp_path / "plain", GPT_OSS, plain)
    found, wanted = load(folder), load(other)
    assert same(found.params, wanted.params)
    assert found.config.weights == wanted.config.weights
    gate = plain["model.layers.1.mlp.experts.gate_up_proj"][3, :, ::2]
    np.testing.assert_array_equal(found.params["layers"][1]["experts"]["gate"][3], gate)
    on_mesh = load(folder, mesh=jax.make_mesh((2, 4), ("data", "model")))
    assert same(jax.device_get(on_mesh.params), wanted.params)
    missing = {name: x for name, x in coded.items() if name != "model.layers.1.mlp.experts.down_proj_scales"}
    with pytest.raises(CheckpointError, match=r"down_proj_blocks in .* lacks .*down_proj_scales"):
        load(write(tmp_path / "missing", published, missing))


def test_a_part_is_read_alone(tmp_path, monkeypatch):
    """Of a tensor that devices share, nobody computes more than his numbers."""
    folder, _ = pair(tmp_path, "pack-quantized int4")
    sizes = []
    real = dequantize.dequantise

    def counting(*args: Any, **options: Any) -> np.ndarray:
        numbers = real(*args, **options)
        sizes.append(numbers.size)
        return numbers

    monkeypatch.setattr(safetensors, "dequantise", counting)
    load(folder, mesh=jax.make_mesh((8,), ("model",)))
    assert max(sizes) == 64 * 96 // 8


def test_what_is_converted_holds_the_numbers(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="needs the extra pods")
    from clusterkv_jax.checkpoints.convert import convert

    folder, plain = pair(tmp_path, "fp8 by blocks")
    convert(folder, tmp_path / "orbax")
    assert same(load(tmp_path / "orbax").params, load(plain).params)


def test_a_plan_reads_the_configuration_alone(tmp_path):
    folder, plain = pair(tmp_path, "mxfp4")
    assert load_config(folder) == load_config(plain)


# --- the order of codes and scales ---


@pytest.mark.parametrize("code", ["offset4", "e2m1"])
def test_the_low_half_of_a_byte_is_the_first_number(code):
    first, second = dequantize.decode(np.array([[0x2F]], np.uint8), code)[0]
    assert (first, second) == {"offset4": (7, -6), "e2m1": (-6, 1)}[code]


def test_every_code_of_a_byte():
    every = np.arange(256, dtype=np.uint8)
    numbers = partial(dequantize.decode, every[:, None])
    np.testing.assert_array_equal(numbers("e4m3")[:, 0], every.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert numbers("e4m3")[0x7E, 0] == 448
    np.testing.assert_array_equal(numbers("int8")[:, 0], [*range(128), *range(-128, 0)])
    np.testing.assert_array_equal(numbers("offset8")[:, 0], range(-128, 128))
    np.testing.assert_array_equal(numbers("e2m1")[:8, 0], E2M1)
    np.testing.assert_array_equal(numbers("e2m1")[8:16, 0], np.negative(E2M1))
    assert (dequantize.POWERS[127], dequantize.POWERS[130], dequantize.POWERS[0]) == (1, 8, 2.0**-127)
    assert np.isnan(dequantize.POWERS[255])


def test_the_blocks_of_experts(tmp_path):
    """As gpt-oss has them: the leading dimensions of experts and outputs are rows."""
    weight = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    parts, numbers = mxfp4("gate_up_proj", weight)
    stacked = {
        "gate_up_proj_blocks": parts["gate_up_proj_blocks"].reshape(2, 3, 2, 16),
        "gate_up_proj_scales": parts["gate_up_proj_scales"].reshape(2, 3, 2),
    }
    how = quantization({"quant_method": "mxfp4"}, "config.json")
    (tensor,) = safetensors.without_codes(entries_of(write(tmp_path / "m", {}, stacked)), how).values()
    np.testing.assert_array_equal(tensor.map(), numbers)
    rows, columns = np.array([1, 4]), np.array([3, 32, 50])
    np.testing.assert_array_equal(tensor.read(rows, columns), numbers[np.ix_(rows, columns)])


@pytest.mark.parametrize(
    ("format", "change"),
    [
        ("fp8 by blocks", lambda parts: {UP + "_scale_inv": parts[UP + "_scale_inv"][:, ::-1]}),
        ("fp8 by blocks", lambda parts: {UP + "_scale_inv": parts[UP + "_scale_inv"][::-1]}),
        ("pack-quantized int4", lambda parts: {UP + "_packed": _swapped(parts[UP + "_packed"])}),
        ("with zero points", lambda parts: {UP + "_zero_point": _swapped(parts[UP + "_zero_point"])}),
        ("mxfp4", lambda parts: {UP + "_blocks": _swapped(parts[UP + "_blocks"])}),
    ],
)
def test_another_order_is_another_model(tmp_path, format, change):
    folder, plain = pair(tmp_path, format)
    config, coded, _ = quantised(format, tensors())
    changed = {name: np.ascontiguousarray(x) for name, x in change(coded).items()}
    write(folder, {**SMALL, "quantization_config": config}, coded | changed)
    assert not same(load(folder).params, load(plain).params)


def _swapped(x):
    """The two halves of every byte exchanged."""
    raw = np.ascontiguousarray(x).view(np.uint8)
    return (raw << 4 | raw >> 4).view(x.dtype)


# --- errors ---


def _without(end):
    return lambda parts: {name: x for name, x in parts.items() if name != UP + end}


def _as(end, x):
    return lambda parts: {**parts, UP + end: x}


WRONG = {
    "no scale": (
        "fp8 by blocks",
        _without("_scale_inv"),
        f"{UP} in .*model.safetensors lacks {UP}_scale_inv, without which its codes are no numbers.",
    ),
    "scales of another shape": (
        "fp8 by blocks",
        _as("_scale_inv", np.ones((6, 2), np.float32)),
        rf"{UP}_scale_inv in .* has the shape \[6, 2\], its codes imply \[6, 3\]",
    ),
    "scales of a type": (
        "int-quantized",
        _as("_scale", np.ones((96, 1), np.int8)),
        f"{UP}_scale in .* holds I8; allowed: F32, F16, BF16",
    ),
    "scales that are not finite": (
        "int-quantized",
        _as("_scale", np.full((96, 1), np.nan, np.float32)),
        f"{UP} in .* holds nan; allowed: numbers that are finite as float32",
    ),
    "no shape": ("pack-quantized int4", _without("_shape"), f"{UP}_packed in .* lacks {UP}_shape, two whole numbers"),
    "another shape": (
        "pack-quantized int4",
        _as("_shape", np.array([96, 2**40])),
        rf"{UP}_packed in .* has the shape \[96, 8\], which does not hold {UP}_shape \[96, 1099511627776\] of 4 bits",
    ),
    "no zeros": ("with zero points", _without("_zero_point"), f"{UP}_packed in .* lacks {UP}_zero_point"),
    "zeros of another shape": (
        "with zero points",
        _as("_zero_point", np.zeros((96, 8), np.int32)),
        rf"{UP}_zero_point in .* has the shape \[96, 8\], its codes imply \[12, 8\]",
    ),
    "codes of a type": (
        "mxfp4",
        _as("_blocks", np.zeros((96, 2, 16), np.int8)),
        f"{UP}_blocks in .* holds I8; allowed: U8",
    ),
    "fewer codes": (
        "mxfp4",
        _as("_blocks", np.zeros((96, 1, 16), np.uint8)),
        rf"{UP}_scales in .* has the shape \[96, 2\], its codes imply \[96, 1\]",
    ),
    "the order of activations": (
        "pack-quantized int4",
        _as("_g_idx", np.zeros(64, np.int32)),
        rf"holds {UP}_g_idx \[64\], which its config.json has no place for",
    ),
    "codes without a scale in the format": (
        "int-quantized",
        _as("", np.zeros((96, 64), np.uint8)),
        f"holds {UP}_scale",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_names_the_tensor(tmp_path, wrong):
    format, change, message = WRONG[wrong]
    config, coded, _ = quantised(format, tensors())
    folder = write(tmp_path / "m", {**SMALL, "quantization_config": config}, change(coded))
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_truncated_file(tmp_path):
    folder, _ = pair(tmp_path, "mxfp4")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load(folder)


PACKED = FORMATS["pack-quantized int4"][0]


def _weights(**changes):
    weights = {**PACKED["config_groups"]["group_0"]["weights"], **changes}
    return {**PACKED, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "gptq", "bits": 3}, "'gptq' of 3 bits in the format None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq' of 4 bits in the format 'gemv'"),
        ({}, "None"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8' of the format 'e5m2'"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "'compressed-tensors' of the format 'nvfp4-pack-quantized'"),
        (_weights(num_bits=3), r"'compressed-tensors' of the format 'pack-quantized' with weights of 3 bits \(int\)"),
        (_weights(actorder="group"), "'compressed-tensors' of .* in the order of activations"),
        (_weights(strategy="tensor_group"), "'compressed-tensors' of .* by 'tensor_group'"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "'compressed-tensors' with transform_config"),
        ({**PACKED, "config_groups": {}}, "'compressed-tensors' with other than one way to store weights"),
    ],
)
def test_what_is_not_dequantised(config, what):
    formats = "'fp8', 'mxfp4', 'gptq', 'awq', and 'compressed-tensors' of the format float-, int- or pack-quantized"
    allowed = f"allowed: {formats}, and "
    published = {**SMALL, "quantization_config": {"quant_method": None, **config}}
    with pytest.raises(ValueError, match=f"^Quantization {what}.* is not supported; {allowed}") as error:
        registry.from_hf(published)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_words_whose_bits_nobody_says_are_refused(method):
    with pytest.raises(ValueError, match=r"config\.json: .*missing required field bits"):
        registry.from_hf({**SMALL, "quantization_config": {"quant_method": method}})


def test_fields_of_another_type():
    config = {"quant_method": "fp8", "weight_block_size": [0, 128]}
    with pytest.raises(ValueError, match=r"config\.json, field 'weight_block_size\.0'|weight_block_size.*>= 1"):
        registry.from_hf(json.loads(json.dumps({**SMALL, "quantization_config": config})))
