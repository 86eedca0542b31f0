"""The decoder against golden outputs, its parts against their definitions, the published configurations by shape."""

import gzip
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from clusterkv_jax.checkpoints.loading import load
from clusterkv_jax.models import hf_weights as weights
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import LinearScaling, Llama3Scaling, ModelConfig, Rope
from clusterkv_jax.models.decoder import forward, forward_hidden, unembed
from clusterkv_jax.models.parameters import abstract, init
from tests.support import families
from tests.support.numbers import normal, relative
from tests.support.shared_data import shared

GOLDEN = Path(__file__).parent / "golden"
SMALL = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
    rope=Rope(10000.0, 8),
)


def tokens_of(batch: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, (batch, length)), jnp.int32)


# Operation by operation, a test would compile dozens of tiny programs.
jitted_forward = jax.jit(forward, static_argnums=1, static_argnames="remat")


def random_params(config: ModelConfig) -> dict[str, Any]:
    """Parameters of unit scale per output; `init` would compile its generators."""
    specs, structure = jax.tree.flatten(abstract(config))
    scaled = (normal(i, *spec.shape) / math.sqrt(spec.shape[0]) for i, spec in enumerate(specs))
    return jax.tree.unflatten(structure, list(scaled))


# --- golden outputs ---


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    """The golden weights as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    with np.load(GOLDEN / "tiny_llama_weights.npz") as golden:
        tensors = {name: golden[name] for name in golden.files if name != "meta"}
        meta = json.loads(str(golden["meta"]))
    save_file(tensors, folder / "model.safetensors")
    published = {"model_type": "llama", "rope_theta": meta["rope_theta"], "tie_word_embeddings": False, **meta["cfg"]}
    (folder / "config.json").write_text(json.dumps(published))
    return folder


def _edit(folder: Path, target: Path, **changes: Any) -> Path:
    published = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(published))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("changes", "same"),
    [({}, True), ({"rope_theta": 10100.0}, False), ({"rms_norm_eps": 2e-5}, False)],
    ids=["as given", "wrong theta", "wrong eps"],
)
def test_golden_tiny_llama(tiny_llama, tmp_path, changes, same):
    """A prompt of 220 tokens, 9 question tokens, then 7 greedy ones, as transformers computed them without compression.

    The slightly wrong configurations show that the tolerance can tell.
    """
    model = load(_edit(tiny_llama, tmp_path, **changes))
    with np.load(GOLDEN / "tiny_llama_kvpress.npz") as golden:
        tokens = np.concatenate([golden["ctx"], golden["question"], golden["greedy_none"][None]], axis=1)
        want, greedy = golden["logits_none"], golden["greedy_none"]
    logits = jitted_forward(model.params, model.config, jnp.asarray(tokens))[0]
    assert (relative(logits[220:229], want) <= 1e-5) == same
    if same:
        np.testing.assert_array_equal(jnp.argmax(logits[228:235], axis=-1), greedy)


def test_golden_stories260k():
    """A trained checkpoint by others: its greedy ids and last logits."""
    folder = shared("checkpoints/stories260k")
    golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    model = load(folder)
    ids = np.asarray(golden["greedy_ids"], np.int32)
    logits = jitted_forward(model.params, model.config, jnp.asarray(ids[None]))[0]
    np.testing.assert_array_equal(jnp.argmax(logits[:-1], axis=-1), ids[1:])
    assert relative(logits[-1, :8], golden["last_logits_first8"]) <= 1e-5


# --- the published configurations ---

QWEN25_14B = {  # Its tensor list is in the shared data, its configuration is not.
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
PUBLISHED = {  # name -> parameters in billions, as the model cards round them
    "LLaMA-2-7B-32K": 6.7,
    "Llama-2-7b-chat-hf": 6.7,
    "Llama-3.1-8B-Instruct": 8.0,
    "Mistral-7B-Instruct-v0.2": 7.2,
    "Mistral-7B-Instruct-v0.3": 7.2,
    "Qwen2-7B-Instruct": 7.6,
    "Qwen2.5-14B-Instruct": 14.8,
    "glm-4-9b-chat": 9.4,
    "opt-6.7b": 6.7,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_by_shape(name):
    """Every name and shape of the published files is accounted for, and the decoder runs on these shapes."""
    folder = shared("data/hub/configs")
    listed = json.loads(gzip.decompress((folder / f"shapes_{name}.json.gz").read_bytes()))["tensors"]
    file = folder / f"{name}.json"
    config = registry.from_hf(json.loads(file.read_text()) if file.exists() else QWEN25_14B)
    stored = weights.layout(config, registry.FAMILIES[config.family].weights)
    want = {tensor: tuple(shape) for tensor, shape in listed.items() if not tensor.endswith("inv_freq")}
    assert weights.file_shapes(stored) == want

    params = jax.eval_shape(partial(init, config=config, dtype=jnp.bfloat16), jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == sum(map(math.prod, want.values()))
    assert round(sum(map(math.prod, want.values())) / 1e9, 1) == PUBLISHED[name]
    two = {**params, "layers": params["layers"][:2]}
    logits = jax.eval_shape(lambda p, t: forward(p, config, t), two, jax.ShapeDtypeStruct((2, 40), jnp.int32))
    assert (logits.shape, logits.dtype) == ((2, 40, config.vocab_size), jnp.float32)


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_stored_views_and_rows_are_inverse(family):
    options = {
        "opt": {"rope": None, "norm": "layer", "gated_mlp": False},
        "olmo2": {"norm_place": "after", "qk_norm": True, "qk_norm_whole": True},
    }.get(family, {})
    config = ModelConfig(**{**vars(SMALL), "family": family, "qkv_bias": True, **options})
    stored = weights.layout(config, registry.FAMILIES[family].weights)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape) for name, shape in weights.file_shapes(stored).items()}
    rebuilt = {name: np.full(tensor.shape, np.nan) for name, tensor in tensors.items()}
    for place, spec in zip(jax.tree.leaves(stored), jax.tree.leaves(abstract(config)), strict=True):
        parameter = place.view(tensors[place.name])
        assert parameter.shape == spec.shape
        assert np.shares_memory(parameter, tensors[place.name])
        rebuilt[place.name][place.start : place.start + place.rows[0]] = place.rows_of(parameter)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(rebuilt[name], tensor)


# --- configurations: both styles, and one sentence for what is not supported ---

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("old", "new", "scaling"),
    [
        ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            LinearScaling(8.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", **_LLAMA3}},
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_both_styles_of_configuration(old, new, scaling):
    new["rope_parameters"]["rope_theta"] = 5e5
    a = registry.from_hf({**_LLAMA, "rope_theta": 5e5, "torch_dtype": "bfloat16", **old})
    b = registry.from_hf({**_LLAMA, "dtype": "bfloat16", **new})
    assert a == b
    assert a.rope == Rope(5e5, 8, scaling=scaling)
    assert a.dtype == "bfloat16"


_OPT = {"model_type": "opt", "vocab_size": 61, "hidden_size": 32, "ffn_dim": 48} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; allowed: chatglm,"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported, the nearest that is: 'qwen3_moe'; allowed: cha"),
        ({}, "model_type None is not supported"),
        ({**_LLAMA, "hidden_act": "tanh"}, "Activation 'tanh' is not supported; allowed: silu"),
        ({**_LLAMA, "rope_parameters": {"rope_type": "ntk"}}, "'ntk' is not supported; allowed: default, linear"),
        ({**_LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' in config.json lacks 'low_freq"),
        ({**_LLAMA, "hidden_size": None}, "config.json, field 'hidden_size': Expected int, got null (None)."),
        ({k: v for k, v in _LLAMA.items() if k != "hidden_size"}, "config.json: Object missing required field hidden_"),
        ({**_LLAMA, "num_hidden_layers": "two"}, "field 'num_hidden_layers': Expected int, got str ('two')."),
        ({**_LLAMA, "num_hidden_layers": 10**5}, "field 'num_hidden_layers': Expected int <= 1024 (100000)."),
        ({**_LLAMA, "num_hidden_layers": 10**9}, "field 'num_hidden_layers': Expected int <= 1024 (1000000000)."),
        ({**_LLAMA, "vocab_size": 2**40}, "field 'vocab_size': Expected int <= 16777216 (1099511627776)."),
        ({**_LLAMA, "num_key_value_heads": 0}, "field 'num_key_value_heads': Expected int >= 1 (0)."),
        ({**_LLAMA, "num_key_value_heads": True}, "field 'num_key_value_heads': Expected int | null, got bool (True)."),
        ({**_LLAMA, "head_dim": 16.0}, "field 'head_dim': Expected int | null, got float (16.0)."),
        ({**_LLAMA, "rms_norm_eps": -1}, "field 'rms_norm_eps': Expected float > 0.0 (-1)."),
        ({**_LLAMA, "rms_norm_eps": float("nan")}, "field 'rms_norm_eps': Expected float > 0.0 (nan)."),
        ({**_LLAMA, "rope_theta": 0}, "field 'rope_theta': Expected float >= 1.0 (0)."),
        ({**_LLAMA, "eos_token_id": "</s>"}, "field 'eos_token_id': Expected int | array | null, got str ('</s>')."),
        ({**_LLAMA, "rope_scaling": [8]}, "field 'rope_scaling': Expected object | null, got array ([8])."),
        ({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "field 'rope_scaling.factor': Expected float >="),
        (
            {**_LLAMA, "rope_scaling": {"rope_type": "llama3", **_LLAMA3, "high_freq_factor": 1}},
            "Llama3Scaling high_freq_factor must be a number above low_freq_factor = 1.0, got 1.0.",
        ),
        ({**_LLAMA, "model_type": ["llama"]}, "field 'model_type': Expected str | null, got array (['llama'])."),
        ({**_LLAMA, "quantization_config": "fp8"}, "'quantization_config': Expected object | null, got str ('fp8')"),
        ({**_LLAMA, "num_key_value_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({**_LLAMA, "quantization_config": {"quant_method": "hqq"}}, "Quantization 'hqq' is not supported"),
        (
            {**_LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "layer_types": []},
            "layer_types in config.json names 0 layers; allowed: 2.",
        ),
        (
            {**_LLAMA, "model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 2},
            "layer_types[0] = 'chunked_attention', which is not supported; allowed: full_attention, sliding_attention.",
        ),
        (
            {**_LLAMA, "model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention = True, which is not supported; allowed: False",
        ),
        (
            {**_LLAMA, "model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0, which is not supported; allowed: None",
        ),
        ({**_OPT, "word_embed_proj_dim": 16}, "word_embed_proj_dim = 16, which is not supported; allowed: 32"),
        ({**_OPT, "do_layer_norm_before": False}, "do_layer_norm_before = False, which is not supported"),
        ({**_OPT, "activation_function": "tanh"}, "Activation 'tanh' is not supported"),
        ({"model_type": "chatglm", "rmsnorm": False}, "rmsnorm = False, which is not supported; allowed: True"),
    ],
)
def test_what_is_not_supported_is_named(published, message):
    with pytest.raises(ValueError, match=r".") as error:
        registry.from_hf(published)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_eps": math.nan}, "ModelConfig norm_eps must be a number above 0, got nan."),
        ({"num_layers": 0}, "ModelConfig num_layers must be a whole number of at least 1, got 0."),
        ({"sliding_layers": (0,)}, "ModelConfig sliding_layers must be some if there is a window, got (0,)."),
        ({"window": 3}, "ModelConfig sliding_layers must be some if there is a window, got ()."),
        ({"window": 3, "sliding_layers": (2,)}, "ModelConfig sliding_layers must be layers, from 0 to 1, got (2,)."),
        ({"soft_cap": 0.0}, "ModelConfig soft_cap must be a number above 0, or None, got 0.0."),
        ({"head_dim": 16.0}, "ModelConfig head_dim must be a whole number of at least 1, got 16.0."),
    ],
)
@pytest.mark.wrong_arguments
def test_impossible_numbers_of_a_model(change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        replace(SMALL, **change)
    with pytest.raises(ValueError, match=r"^Rope theta must be a number above 0, got 0\.$"):
        Rope(0, 8)


def test_sliding_layers():
    """Those of the configuration; a window that no text exceeds is none."""
    published = {**_LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "num_hidden_layers": 3}
    assert registry.from_hf({**published, "sliding_window": None}).sliding_layers == ()
    assert registry.from_hf({**published, "max_position_embeddings": 4096}).sliding_layers == ()
    assert registry.from_hf(published).sliding_layers == (0, 1, 2)  # v0.1 leaves 4096 out
    qwen = published | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "head_dim": 8}
    config = registry.from_hf(qwen)
    assert (config.window, config.sliding_layers, config.global_layers) == (4096, (1, 2), (0,))
    assert registry.from_hf(qwen | {"model_type": "qwen3"}).sliding_layers == (1, 2)
    to_hf = registry.FAMILIES["qwen3"].to_hf
    assert to_hf is not None
    again = to_hf(registry.from_hf(qwen | {"model_type": "qwen3"}))
    assert registry.from_hf(again) == registry.from_hf(qwen | {"model_type": "qwen3"})


def test_both_styles_of_gemma_3_say_the_same():
    common = {**_LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 64}
    ropes = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    types = ["sliding_attention", "full_attention"] * 3
    new = {name: x for name, x in common.items() if name != "rope_theta"}
    new |= {"rope_parameters": ropes, "layer_types": types}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = common | {"rope_theta": 1e6, "rope_scaling": scaling, "sliding_window_pattern": 2}
    config = registry.from_hf(old | {"rope_local_base_freq": 1e4})
    assert config == registry.from_hf(new)
    assert config.sliding_layers == (0, 2, 4)
    near, far = config.of_layer(0), config.of_layer(1)
    assert (near.rope, near.window) == (Rope(1e4, 8), 64)
    assert (far.rope, far.window) == (Rope(1e6, 8, scaling=LinearScaling(8.0)), None)
    assert config.of_layer(2) == near
    assert [config.global_number(layer) for layer in range(4)] == [None, 0, None, 1]
    images = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "sliding_window": 1024}}
    assert registry.from_hf(images).hidden_size == 2560


# --- the decoder's own rules ---


def test_parameters_are_what_abstract_declares():
    params, specs = init(jax.random.key(0), SMALL, jnp.bfloat16), abstract(SMALL)
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        assert (leaf.shape, leaf.dtype, len(spec.axes)) == (spec.shape, jnp.bfloat16, leaf.ndim)
    assert relative(params["layers"][0]["mlp"]["up"], params["layers"][1]["mlp"]["up"]) > 0.5


def test_later_tokens_and_padding_do_not_matter():
    params = random_params(SMALL)
    tokens = tokens_of(2, 20)
    full = jitted_forward(params, SMALL, tokens)
    padded = jitted_forward(params, SMALL, jnp.pad(tokens[:, :13], ((0, 0), (0, 7))))
    assert relative(padded[:, :13], full[:, :13]) < 1e-6


def test_remat_changes_no_gradient():
    params = random_params(SMALL)
    tokens = tokens_of(2, 20)
    plain, remat = (
        jax.jit(jax.grad(lambda p, remat=remat: jnp.mean(forward(p, SMALL, tokens, remat=remat) ** 2)))(params)
        for remat in (False, True)
    )
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: relative(a, b) < 1e-5, plain, remat)))


def test_bfloat16_computes_in_bfloat16_and_answers_in_float32():
    wide = random_params(SMALL)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    tokens = tokens_of(2, 20)
    hidden = jax.jit(forward_hidden, static_argnums=1)(params, SMALL, tokens)
    logits = jax.jit(unembed, static_argnums=1)(params, SMALL, hidden)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert relative(logits, jitted_forward(wide, SMALL, tokens)) < 0.03


def test_a_configuration_is_a_static_argument():
    assert hash(SMALL) == hash(ModelConfig(**vars(SMALL)))
    with pytest.raises(ValueError, match=r"rope\.dim = 7 must be even"):
        ModelConfig(**{**vars(SMALL), "rope": Rope(1e4, 7)})


def test_every_family_is_in_the_table_of_the_tests():
    names = {*registry.FAMILIES}
    assert {*families.PUBLISHED} | {*families.SAME_AS} == names
    compared = {published["model_type"] for published in families.PARITY.values()}
    assert compared == names - {"chatglm", *families.WRAPPERS}
