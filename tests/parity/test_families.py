"""Tiny random checkpoints of every family, written by transformers on torch, read by us: same logits, same tokens."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import clusterkv_jax as ckv
from clusterkv_jax.models.decoder import forward

torch = pytest.importorskip("torch", reason="the parity tests compare with transformers on torch: pip install torch")
import transformers  # noqa: E402  (transformers decides on import what it can do with torch)

from tests.support.families import COVERED, GRANITE, LLAMA3, PARITY  # noqa: E402
from tests.support.shared_data import shared  # noqa: E402

# transformers rotates shorter texts otherwise; we have one kind of rotation a model.
_LONG_ONLY = {"phi4-mini": 33}
_COVERED = [name for name, published in PARITY.items() if published["model_type"] in COVERED]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(name)`: the reference model of a family and the folder that it was saved to."""
    checkpoints: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in checkpoints:
            folder = tmp_path_factory.mktemp(name.replace(".", "_"))
            reference = _reference(name)
            reference.save_pretrained(folder)
            checkpoints[name] = reference, folder
        return checkpoints[name]

    return make


def _reference(name: str) -> Any:
    published = dict(PARITY[name])
    config = transformers.AutoConfig.for_model(published.pop("model_type"), **published)
    torch.manual_seed(sum(name.encode()))
    return _told_apart(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def _told_apart(model: Any) -> Any:
    """The model, in float32. Fresh norms are ones and fresh biases zeros: neither would be missed."""
    model = model.eval().float()
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            if parameter.ndim == 1 or "bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def _prompt(length: int, vocab: int = 151) -> np.ndarray:
    return np.random.default_rng(length).integers(3, vocab, (1, length), dtype=np.int32)


def _reference_logits(reference: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.from_numpy(tokens).long()).logits.float().numpy()


def _reference_greedy(reference: Any, tokens: np.ndarray, count: int) -> list[int]:
    ids = torch.from_numpy(tokens).long()
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return output[0, tokens.shape[1] :].tolist()


def _relative(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def _logits(model: ckv.Model, tokens: np.ndarray) -> jax.Array:
    return jax.jit(forward, static_argnums=1)(model.params, model.config, jnp.asarray(tokens))


def _greedy(model: ckv.Model, tokens: np.ndarray, count: int) -> list[int]:
    result = ckv.generate(model, [tokens[0].tolist()], method=ckv.Full(), max_new_tokens=count)
    return [int(token) for token in result.tokens[0]]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=pytest.mark.exhaustive if length == 7 and name in _COVERED else ())
        for name in PARITY
        for length in (7, 600)
        if length >= _LONG_ONLY.get(name, 1)
    ],
)
def test_logits(checkpoint, name, length):
    reference, folder = checkpoint(name)
    tokens = _prompt(length)
    assert _relative(_logits(ckv.load(folder), tokens), _reference_logits(reference, tokens)) <= 1e-5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in _COVERED else ()) for name in PARITY]
)
def test_greedy_tokens(checkpoint, name):
    reference, folder = checkpoint(name)
    tokens = _prompt(40)
    assert _greedy(ckv.load(folder), tokens, 64) == _reference_greedy(reference, tokens, 64)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama3", "rope_theta", 499000.0),
        ("llama3.1", "low_freq_factor", 1.1),
        ("llama2-32k", "factor", 8.01),
        ("glm", "partial_rotary_factor", 0.25),
        ("qwen3", "rms_norm_eps", 1.1e-5),
        *(("granite", key, 1.002 * value) for key, value in GRANITE.items()),
        ("olmo2", "rms_norm_eps", 1.1e-5),
        ("qwen2.5-yarn", "factor", 16.02),
        ("llama-yarn", "beta_slow", 1.8),
        ("llama-yarn-mscale", "mscale", 1.21),
        ("phi3", "rms_norm_eps", 1.1e-5),
        ("phi4-mini", "long_factor", [1.0, 1.3, 2.0, 4.0, 9.1, 25.0]),
        ("phi4-mini", "original_max_position_embeddings", 33),
        ("qwen3-moe", "norm_topk_prob", False),
        ("qwen3-moe-shares", "norm_topk_prob", True),
        ("mixtral", "num_experts_per_tok", 1),
        ("mistral-v0.1", "sliding_window", 65),
        ("mistral-v0.1", "sliding_window", 63),
        ("phi3-4k", "sliding_window", 101),
        ("qwen2-window", "sliding_window", 49),
        ("qwen2-window", "layer_types", ["full_attention", "full_attention", "sliding_attention"]),
        ("gemma2", "sliding_window", 51),
        ("gemma2", "attn_logit_softcapping", 4.01),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", 30.03),
        ("gemma2", "query_pre_attn_scalar", 17),
        ("gemma3", "sliding_window", 49),
        ("gemma3", "full_attention", {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.01}),
        ("gemma3", "sliding_attention", {"rope_type": "default", "rope_theta": 1.01e4}),
        ("gemma3", "query_pre_attn_scalar", 17),
        ("gpt-oss", "sliding_window", 41),
        ("gpt-oss", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gpt-oss", "swiglu_limit", 2.01),
        ("gpt-oss", "swiglu_alpha", 1.704),
        ("gpt-oss", "num_experts_per_tok", 2),
        ("gpt-oss", "truncate", True),
        ("gpt-oss", "factor", 32.02),
        ("ministral", "sliding_window", 49),
        ("olmo3", "sliding_window", 51),
        ("olmo3", "full_attention", {"rope_type": "default", "rope_theta": 1e5}),
        ("olmo3", "sliding_attention", {"rope_type": "default", "rope_theta": 1.01e5}),
        ("ernie4.5", "rope_theta", 490000.0),
        ("granite4", "residual_multiplier", 0.221),
        ("smollm3", "no_rope_layers", [1, 1]),
        ("smollm3-window", "sliding_window", 49),
        ("exaone4", "sliding_window", 49),
        ("qwen2-moe", "norm_topk_prob", True),
        ("glm4.5", "routed_scaling_factor", 1.502),
        ("glm4.5", "norm_topk_prob", False),
        ("glm4.5", "num_experts_per_tok", 2),
        ("ministral3", "llama_4_scaling_beta", 0.301),
        ("llama4", "attn_scale", 0.301),
        ("llama4", "floor_scale", 51),
        ("cohere2", "sliding_window", 49),
        ("cohere2", "logit_scale", 0.2002),
    ],
)
def test_a_slightly_wrong_configuration_fails(checkpoint, tmp_path, name, key, value):
    reference, folder = checkpoint(name)
    published = json.loads((folder / "config.json").read_text())
    target = published if key in published else published["rope_parameters"]
    assert key in target
    target[key] = value
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens = _prompt(300)
    assert _relative(_logits(ckv.load(tmp_path), tokens), _reference_logits(reference, tokens)) > 1e-5


def test_rope_far_out(checkpoint):
    """Positions beyond 100k, where a float32 angle has few bits left: frequencies must round as the reference's do."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from clusterkv_jax.blocks.rope import rotate
    from clusterkv_jax.models.registry import from_hf

    rope_parameters = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope_parameters
    )
    _, folder = checkpoint("llama3.1")
    published = json.loads((folder / "config.json").read_text())
    published |= {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "rope_parameters": rope_parameters}
    ours = from_hf(published).rope
    assert ours is not None
    x = np.random.default_rng(0).standard_normal((1, 64, 2, 128)).astype(np.float32)
    positions = np.arange(131008, 131072, dtype=np.int32)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.from_numpy(x), torch.from_numpy(positions).long())
    want, _ = apply_rotary_pos_emb(torch.from_numpy(x), torch.from_numpy(x), cos, sin, unsqueeze_dim=2)
    assert _relative(rotate(jnp.asarray(x), jnp.asarray(positions), ours), want.numpy()) <= 1e-5


def test_glm_as_published(checkpoint, tmp_path):
    """The same weights in the layout of the original GLM-4 release."""
    reference, folder = checkpoint("glm")
    _write_chatglm(tmp_path, load_file(folder / "model.safetensors"), reference.config)
    model, tokens = ckv.load(tmp_path), _prompt(300)
    assert model.config.family == "chatglm"
    assert _relative(_logits(model, tokens), _reference_logits(reference, tokens)) <= 1e-5
    assert _greedy(model, _prompt(40), 64) == _reference_greedy(reference, _prompt(40), 64)


def _write_chatglm(folder: Path, hf: dict[str, np.ndarray], config: Any) -> None:
    body = "transformer.encoder."
    tensors = {
        "transformer.embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "transformer.rotary_pos_emb.inv_freq": np.ones(8, np.float32),
        "transformer.output_layer.weight": hf["lm_head.weight"],
        f"{body}final_layernorm.weight": hf["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"{body}layers.{layer}."
        for part in ("weight", "bias"):
            fused = [hf[f"{theirs}self_attn.{name}_proj.{part}"] for name in "qkv"]
            tensors[f"{ours}self_attention.query_key_value.{part}"] = np.concatenate(fused)
        tensors[f"{ours}self_attention.dense.weight"] = hf[f"{theirs}self_attn.o_proj.weight"]
        tensors[f"{ours}mlp.dense_h_to_4h.weight"] = hf[f"{theirs}mlp.gate_up_proj.weight"]
        tensors[f"{ours}mlp.dense_4h_to_h.weight"] = hf[f"{theirs}mlp.down_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{ours}{norm}.weight"] = hf[f"{theirs}{norm}.weight"]
    save_file(tensors, folder / "model.safetensors")
    published = {
        "model_type": "chatglm",
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "padded_vocab_size": config.vocab_size,
        "seq_length": config.max_position_embeddings,
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_ratio": 500,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(published))


def test_the_texts_of_a_gemma_3_of_texts_and_images(checkpoint, tmp_path):
    """The same weights under the names that they have beside those for images."""
    reference, folder = checkpoint("gemma3")
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors | {"vision_tower.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    published = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model, tokens = ckv.load(tmp_path), _prompt(300)
    assert _relative(_logits(model, tokens), _reference_logits(reference, tokens)) <= 1e-5


_PART = {
    **{name: value for name, value in PARITY["llama3"].items() if name not in ("model_type", "rope_parameters")},
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
_MROPE = {"rope_parameters": _PART["rope_parameters"] | {"mrope_section": [2, 3, 3]}}
_IMAGES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
_OF_IMAGES: dict[str, dict[str, Any]] = {
    "llama4": {
        **{"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64},
        **{"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
    },
    "mistral3": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8},
    "qwen2_5_vl": _IMAGES | {"fullatt_block_indexes": [0]},
    "qwen3_vl": _IMAGES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("mistral3", {"model_type": "mistral", "sliding_window": None}),
        ("mistral3", {"model_type": "ministral3", "rope_parameters": PARITY["ministral3"]["rope_parameters"]}),
        ("llama4", PARITY["llama4"]),
        ("qwen2_5_vl", {"model_type": "qwen2_5_vl_text", **_MROPE}),
        ("qwen3_vl", {"model_type": "qwen3_vl_text", **_MROPE}),
    ],
)
def test_the_texts_of_models_of_texts_and_images(tmp_path, kind, part):
    """As transformers writes them: with the tensors for images, which are not read."""
    outer = {"tie_word_embeddings": False, "eos_token_id": None}
    parts = {"text_config": _PART | part, "vision_config": _OF_IMAGES[kind]}
    config = transformers.AutoConfig.for_model(kind, **outer, **parts)
    reference = _told_apart(transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    if kind == "llama4":  # whose own call fails without images
        reference = reference.language_model
    model, tokens = ckv.load(tmp_path), _prompt(300)
    assert model.config.family == kind
    assert _relative(_logits(model, tokens), _reference_logits(reference, tokens)) <= 1e-5


def test_stories260k():
    folder = shared("checkpoints/stories260k")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    model, tokens = ckv.load(folder), _prompt(300, 512)
    assert _relative(_logits(model, tokens), _reference_logits(reference, tokens)) <= 1e-5
    assert _greedy(model, _prompt(40, 512), 64) == _reference_greedy(reference, _prompt(40, 512), 64)


def test_our_folders_load_in_transformers(checkpoint, tmp_path):
    """Save with ours, load with theirs: the way the demo model is published."""
    from clusterkv_jax.checkpoints.loading import save_huggingface

    for name in ("llama3.1", "llama-biases", "smollm2", "qwen3"):
        reference, folder = checkpoint(name)
        model = ckv.load(folder)
        save_huggingface(tmp_path / name, model.params, model.config, dtype="float32")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager").eval()
        tokens = _prompt(50)
        np.testing.assert_array_equal(_reference_logits(again, tokens), _reference_logits(reference, tokens))


def test_the_demo_model():
    """The packaged checkpoint answers with the same greedy tokens in transformers."""
    try:
        model = ckv.load("demo")
    except ckv.CheckpointError as error:
        pytest.skip(str(error))
    from importlib import resources

    folder = str(resources.files("clusterkv_jax.models") / "demo")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    text = "The key to the amber door lies under the third stone by the gate, said the old man. " * 20
    tokens = np.asarray([model.tokenizer(text)["input_ids"]], np.int32)
    assert _relative(_logits(model, tokens), _reference_logits(reference, tokens)) <= 1e-5
    ends = set(model.config.eos_ids)
    want = _reference_greedy(reference, tokens, 64)
    want = want[: next((i + 1 for i, token in enumerate(want) if token in ends), 64)]
    assert _greedy(model, tokens, 64) == want
