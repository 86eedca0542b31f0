"""Models whose weights stay in codes: their logits are those of the numbers that these stand for, within rounding."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.benchmark.own_runner import random_params
from clusterkv_jax.blocks.embedding import embed
from clusterkv_jax.checkpoints.activation_aware import codes_by_text
from clusterkv_jax.checkpoints.loading import open_checkpoint, parameter_name, save_huggingface
from clusterkv_jax.checkpoints.repack import dequantised_rows
from clusterkv_jax.checkpoints.rounding import rounded
from clusterkv_jax.kernels.weight_codes import QuantisedWeights, dequantised
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.planning.abstract_request import parameters
from clusterkv_jax.runtime.sharding import named_mesh, on_mesh
from clusterkv_jax.training import trainees
from tests.support import gguf_writer
from tests.support.checkpoint_files import FAMILIES, GPT_OSS, LLAMA, random_tensors, same, write
from tests.support.quantised_files import FORMATS, mxfp4, quantised

SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
TIED = {**SMALL, "tie_word_embeddings": True}
WIDE = {**SMALL, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
NUMBERS = jax.jit(dequantised)
# Formats whose groups do not follow each other, or divide no inputs, become numbers.
KINDS = {
    "fp8 by blocks": {"down": "fp8"},
    "fp8": "fp8",
    "float-quantized": "fp8",
    "int-quantized": "int8",
    "pack-quantized int4": "int4",
    "pack-quantized int8": "int8",
    "with zero points": "int4",
    "gptq": "int4",
    "gptq int8": "int8",
    "gptq by activations": {},
    "awq": "int4",
    "mxfp4": "mxfp4",
}


def is_coded(x):
    return isinstance(x, QuantisedWeights)


def logits(model):
    run = jax.jit(forward, static_argnums=1)
    with on_mesh(model.mesh, model.config.num_kv_heads):
        return np.asarray(run(model.params, model.config, jnp.asarray(TOKENS)))


def assert_same_model(found, wanted, bound=2e-3):
    a, b = logits(found), logits(wanted)
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def kinds(layer):
    parts = layer["attention"] | layer.get("mlp", {}) | layer.get("experts", {})
    return {name: x.kind for name, x in parts.items() if is_coded(x)}


@cache
def tensors():
    return random_tensors(SMALL)


def folder_of(tmp_path, format, published=SMALL, source=None):
    config, coded, _ = quantised(format, tensors() if source is None else source)
    return write(tmp_path / "coded", {**published, "quantization_config": config}, coded)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_of_files_stay_codes(tmp_path, format):
    folder = folder_of(tmp_path, format)
    found, wanted = ckv.load(folder, weights="stored"), ckv.load(folder, weights="dequantised")
    expected = KINDS[format]
    every = expected if isinstance(expected, dict) else dict.fromkeys(kinds(found.params["layers"][0]), expected)
    assert kinds(found.params["layers"][0]) == every
    assert len(every) == 7 or isinstance(expected, dict)
    assert found.config.weights == wanted.config.weights
    for mine, own in zip(jax.tree.leaves(found.params, is_leaf=is_coded), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(NUMBERS(mine), own, rtol=0, atol=1e-3 * np.abs(own).max())
    assert_same_model(found, wanted)


def test_what_is_trained_and_saved_for_others_is_numbers(tmp_path):
    folder = folder_of(tmp_path, "gptq")
    found, wanted = ckv.load(folder, weights="stored"), ckv.load(folder, weights="dequantised")
    trained = trainees.of_model(found).weights
    for mine, own in zip(jax.tree.leaves(trained), jax.tree.leaves(wanted.params), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, own, rtol=0, atol=1e-3 * np.abs(own).max())
    save_huggingface(tmp_path / "saved", found.params, found.config, dtype="float32")
    assert_same_model(ckv.load(tmp_path / "saved"), wanted)


@pytest.mark.parametrize("format", ["int-quantized", "awq", "mxfp4"])
def test_devices_share_codes(tmp_path, format):
    """Where groups of inputs are not shared equally, each device has all of them."""
    folder = folder_of(tmp_path, format)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    found = ckv.load(folder, mesh=mesh, weights="stored")
    layer = found.params["layers"][0]
    assert layer["mlp"]["up"].codes.addressable_shards[0].data.shape[-1] == 48
    shared = {"int-quantized": 48, "awq": 24, "mxfp4": 48}[format]  # three groups of 32 on two devices
    assert layer["mlp"]["down"].codes.addressable_shards[0].data.shape[0] == shared
    assert_same_model(found, ckv.load(folder, weights="dequantised"))


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_fused_projections_and_experts(tmp_path, family):
    published = {**FAMILIES[family], "hidden_size": 64}
    folder = folder_of(tmp_path, "with zero points", published, random_tensors(published))
    found, wanted = ckv.load(folder, weights="stored"), ckv.load(folder, weights="dequantised")
    assert len(kinds(found.params["layers"][1])) == 7
    assert_same_model(found, wanted)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    assert_same_model(ckv.load(folder, mesh=mesh, weights="stored"), wanted)


def test_experts_of_gpt_oss(tmp_path):
    coded = random_tensors(GPT_OSS)
    for name in (name for name in list(coded) if name.endswith(("gate_up_proj", "down_proj"))):
        parts = [mxfp4(name, np.ascontiguousarray(expert.T))[0] for expert in coded.pop(name)]
        coded |= {part: np.stack([of[part] for of in parts]) for part in parts[0]}
    folder = write(tmp_path / "coded", {**GPT_OSS, "quantization_config": FORMATS["mxfp4"][0]}, coded)
    found, wanted = ckv.load(folder, weights="stored"), ckv.load(folder, weights="dequantised")
    assert kinds(found.params["layers"][0]) == dict.fromkeys(("gate", "up", "down"), "mxfp4")
    assert_same_model(found, wanted)


@pytest.mark.parametrize("published", [WIDE, {**WIDE, "tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"])
def test_types_of_gguf_files(tmp_path, kind, published):
    source = {name: 0.05 * x for name, x in random_tensors(published).items()}
    file = gguf_writer.write(tmp_path / "model.gguf", published, source, kind)
    found, wanted = ckv.load(file, weights="stored"), ckv.load(file, weights="dequantised")
    assert len(kinds(found.params["layers"][0])) == 7
    head = found.params["embed" if published["tie_word_embeddings"] else "lm_head"]
    assert head.kind == found.params["layers"][0]["mlp"]["up"].kind
    for name in ("q", "o"):  # rows in the order of pairs, and heads as inputs
        mine, own = (model.params["layers"][0]["attention"][name] for model in (found, wanted))
        np.testing.assert_allclose(NUMBERS(mine), own, rtol=0, atol=1e-3 * np.abs(own).max())
    assert_same_model(found, wanted)


@pytest.mark.parametrize(("weights", "most"), [("int8", 1 / 254), ("int4", 1 / 15)])
def test_numbers_are_rounded_to_the_nearest_code(tmp_path, weights, most):
    folder = write(tmp_path / "plain", SMALL, tensors())
    found, wanted = ckv.load(folder, weights=weights), ckv.load(folder)
    assert set(kinds(found.params["layers"][0]).values()) == {weights}
    assert found.params["lm_head"].kind == "int8"  # whatever layers are
    assert not is_coded(found.params["embed"])  # which is no head
    mine, own = (model.params["layers"][0]["mlp"]["up"] for model in (found, wanted))
    step = most * np.abs(own).max()  # half of one, at most
    error = np.sqrt(np.mean((NUMBERS(mine) - own) ** 2))
    assert 0 < error <= 1.01 * step / np.sqrt(3)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_table_that_is_the_head_too_is_in_int8_once(tmp_path, weights):
    """Embeddings are rows of the numbers that the head is multiplied with, on a mesh as well, whose devices share them;
    what is trained and saved for others has these numbers.
    """
    folder = write(tmp_path / "plain", TIED, random_tensors(TIED))
    found, mesh = ckv.load(folder, weights=weights), jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    table, numbers = found.params["embed"], dequantised(found.params["embed"])
    assert (table.kind, table.codes.shape, table.scales.shape) == ("int8", (64, 64), (1, 64))
    assert "lm_head" not in found.params
    half = np.abs(numbers).max(axis=1, keepdims=True) / 254
    plain = ckv.load(folder).params["embed"]
    assert np.all(np.abs(numbers - plain) <= 1.001 * half)
    shared = ckv.load(folder, weights=weights, mesh=mesh)
    assert shared.params["embed"].codes.addressable_shards[0].data.shape == (64, 32)
    for model in (found, shared):
        with on_mesh(model.mesh, model.config.num_kv_heads):
            rows = jax.jit(embed, static_argnums=1)(model.params, model.config, jnp.asarray(TOKENS), 0 * TOKENS)
        np.testing.assert_array_equal(rows, numbers[TOKENS])
    in_numbers = jax.tree.map(lambda x: jnp.asarray(dequantised(x)), found.params, is_leaf=is_coded)
    for model in (found, shared):
        assert_same_model(model, replace(found, params=in_numbers), 1e-5)
    assert same(trainees.of_model(found).weights["embed"], numbers)
    save_huggingface(tmp_path / "saved", found.params, found.config, dtype="float32")
    assert same(ckv.load(tmp_path / "saved").params["embed"], numbers)
    half_type = ckv.load(folder, weights=weights, dtype="bfloat16")
    assert ckv.generate(half_type, [[1, 2, 3]], method=ckv.Full(), max_new_tokens=4).tokens[0]


def off(numbers, coded):
    return np.mean((dequantised_rows(coded) - numbers) ** 2)


def test_scales_of_int4_are_those_of_least_squares():
    """None near those that were chosen is better; codes from the least to the largest number are worse."""
    numbers = np.random.default_rng(0).normal(size=(40, 128)).astype(np.float32)
    coded = rounded(numbers, "int4")
    assert coded.offsets is not None
    least, most = numbers.min(axis=1, keepdims=True), numbers.max(axis=1, keepdims=True)
    plain = np.rint((numbers - least) / (most - least) * 15) * (most - least) / 15 + least
    assert off(numbers, coded) < 0.93 * np.mean((plain - numbers) ** 2)
    for scale, offset in ((0.95, 0), (1.05, 0), (1, 0.1), (1, -0.1)):
        moved = replace(coded, scales=coded.scales * scale, offsets=coded.offsets + offset * coded.scales)
        assert off(numbers, coded) < off(numbers, moved)
    flat = rounded(np.full((2, 32), 0.25, np.float32), "int4")
    np.testing.assert_array_equal(dequantised_rows(flat), np.full((2, 32), 0.25))


def test_codes_make_good_what_others_are_off():
    """Outputs of inputs that go together are nearer than with the nearest codes; the scales are theirs."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(24, 96)).astype(np.float32)
    x = (rng.normal(size=(400, 12)) @ rng.normal(size=(12, 96)) + 0.3 * rng.normal(size=(400, 96))).astype(np.float32)
    nearest, found = rounded(numbers, "int4"), rounded(numbers, "int4", x.T @ x / len(x))
    np.testing.assert_array_equal(found.scales, nearest.scales)
    errors = [np.linalg.norm(x @ (dequantised_rows(own) - numbers).T) for own in (nearest, found)]
    assert errors[1] < 0.6 * errors[0]
    apart = rounded(numbers, "int4", np.eye(96, dtype=np.float32))  # nothing goes together
    np.testing.assert_array_equal(apart.codes, nearest.codes)


def test_what_is_no_way_to_hold_weights(tmp_path):
    folder = write(tmp_path / "plain", SMALL, tensors())
    with pytest.raises(ValueError, match=r"weights must be one of 'stored', .*, or None, got 'int3'\."):
        ckv.load(folder, weights="int3")


def test_scales_that_are_not_finite_are_refused(tmp_path):
    config, coded, _ = quantised("int-quantized", tensors())
    name = "model.layers.1.mlp.up_proj.weight_scale"
    coded = coded | {name: np.full_like(coded[name], np.nan)}
    folder = write(tmp_path / "coded", {**SMALL, "quantization_config": config}, coded)
    with pytest.raises(ValueError, match="holds nan"):
        ckv.load(folder, weights="stored")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_plans_and_random_weights_are_in_the_codes_of_loaded_ones(tmp_path, weights, tied):
    published = FAMILIES["qwen3_moe"] | {"hidden_size": 64, "tie_word_embeddings": tied}
    folder = write(tmp_path / "plain", published, random_tensors(published))
    model = ckv.load(folder, weights=weights)
    drawn = random_params(model.config, jnp.float32, weights=weights)
    plain = {**drawn, "layers": [{k: x for k, x in layer.items() if k != "surrogate"} for layer in drawn["layers"]]}
    planned = parameters(model.config, named_mesh("model=1", jax.devices()[:1]), jnp.float32, weights=weights)

    def shapes(tree):
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    assert shapes(plain) == shapes(planned) == shapes(model.params)
    up = dequantised(drawn["layers"][0]["mlp"]["up"])
    np.testing.assert_allclose(jnp.std(up), 64**-0.5, rtol=0.1)


@pytest.mark.parametrize("published", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_converted_keeps_codes(tmp_path, weights, published):
    pytest.importorskip("orbax.checkpoint", reason="needs the extra pods")
    from clusterkv_jax.checkpoints.convert import convert

    folder = write(tmp_path / "plain", published, random_tensors(published))
    assert convert(folder, tmp_path / "codes", weights=weights)
    assert not convert(folder, tmp_path / "codes", weights=weights)
    with pytest.raises(ValueError, match="holds another model, or another type"):
        convert(folder, tmp_path / "codes")
    found, wanted = ckv.load(tmp_path / "codes", weights="stored"), ckv.load(folder, weights=weights)
    assert same(found.params, wanted.params)
    assert found.config.weights == wanted.config.weights
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    assert same(jax.device_get(ckv.load(tmp_path / "codes", mesh=mesh).params), jax.device_get(wanted.params))
    numbers = ckv.load(tmp_path / "codes", weights="dequantised").params["layers"][0]["mlp"]["up"]
    np.testing.assert_array_equal(numbers, dequantised(wanted.params["layers"][0]["mlp"]["up"]))


@pytest.mark.parametrize("published", [WIDE, {**WIDE, "tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize(("kind", "weights"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_codes_of_a_file_are_not_rounded_again(tmp_path, kind, weights, published):
    pytest.importorskip("orbax.checkpoint", reason="needs the extra pods")
    from clusterkv_jax.checkpoints.convert import convert

    source = {name: 0.05 * x for name, x in random_tensors(published).items()}
    file = gguf_writer.write(tmp_path / "model.gguf", published, source, kind)
    stored = ckv.load(file, weights="stored").params
    assert same(ckv.load(file, weights=weights).params, stored)
    assert convert(file, tmp_path / "codes", weights=weights, dtype="float32")
    found = ckv.load(tmp_path / "codes")
    assert same(found.params["layers"], stored["layers"])
    assert logits(found).shape == (2, 6, 64)


PIECES = np.random.default_rng(1).integers(0, 64, (4, 48)).tolist()


@pytest.mark.parametrize("family", ["glm4", "cohere2", "qwen2_moe"])
def test_codes_by_a_text_keep_more_of_the_model(tmp_path, family):
    """Blocks one after the other and side by side, norms behind them, and an expert that every token goes through."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 64}
    published = {**FAMILIES[family], **{name: n for name, n in sizes.items() if name in FAMILIES[family]}}
    folder = write(tmp_path / "plain", published, random_tensors(published))
    plain, nearest = ckv.load(folder), ckv.load(folder, weights="int4")
    codes = codes_by_text(open_checkpoint(folder), PIECES, lambda done, total: None)
    assert set(codes) == {
        name for name in names(nearest.params) if name not in ("embed", "lm_head") and ".experts." not in name
    }

    def place(path, x):
        own = codes.get(parameter_name(path))
        return x if own is None else jax.tree.map(jnp.asarray, own)

    by_text = jax.tree.map_with_path(place, nearest.params, is_leaf=is_coded)
    run = jax.jit(forward, static_argnums=1)
    wanted, near, text = (run(x, plain.config, jnp.asarray(PIECES)) for x in (plain.params, nearest.params, by_text))
    assert np.linalg.norm(text - wanted) < 0.9 * np.linalg.norm(near - wanted)


def test_what_is_converted_by_a_text(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="needs the extra pods")
    from clusterkv_jax.checkpoints.convert import convert

    folder, target, done = write(tmp_path / "plain", SMALL, tensors()), tmp_path / "codes", []
    assert convert(folder, target, weights="int4", data=PIECES, progress=lambda *layers: done.append(layers))
    assert done == [(0, 2), (1, 2), (2, 2)]
    assert not convert(folder, target, weights="int4", data=PIECES)
    found = {
        parameter_name(path): x for path, x in jax.tree.leaves_with_path(ckv.load(target).params, is_leaf=is_coded)
    }
    wanted = codes_by_text(open_checkpoint(folder), PIECES, lambda done, total: None)
    assert all(same(found[name], own) for name, own in wanted.items())
    for others in (None, PIECES[:2]):
        with pytest.raises(ValueError, match="holds another model, or another type than float32 with weights in int4"):
            convert(folder, target, weights="int4", data=others)
    for weights, pieces in (("int8", PIECES), (None, PIECES), ("int4", [[1, 2], [3]]), ("int4", [])):
        with pytest.raises(ValueError, match=r"data is for weights 'int4', in texts of equally many tokens, got"):
            convert(folder, tmp_path / "other", weights=weights, data=pieces)


def test_a_text_says_how_int4_is_rounded(tmp_path):
    command = ["convert", "demo", str(tmp_path / "codes"), "--weights", "int8", "--data", str(tmp_path)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2
    assert "--data says how --weights int4 rounds, got --weights int8." in result.stderr
    assert not list(tmp_path.iterdir())


def names(params):
    found = jax.tree.leaves_with_path(params, is_leaf=is_coded)
    return [parameter_name(path) for path, x in found if is_coded(x)]
