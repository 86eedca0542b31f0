"""Every field of every family's class in transformers at three other values: its logits, or a refusal that names it.

Fields that decoders follow change together, three times, so that few programs compile: a field that is misread is told
by the logits all the same. `tests/test_configurations.py` asks that every field is declared.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models import registry
from clusterkv_jax.models.decoder import forward

torch = pytest.importorskip("torch", reason="the parity tests compare with transformers on torch: pip install torch")
import transformers  # noqa: E402  (transformers decides on import what it can do with torch)

from tests.support.families import COVERED, WRAPPERS  # noqa: E402

# Ids that a vocabulary lacks are left out with a warning, and so are files that transformers wonders at.
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = sorted(registry.FAMILIES.keys() & transformers.CONFIG_MAPPING.keys() - WRAPPERS.keys())
THETA = {"rope_theta": 7e3}
WHOLE, NEAR = "full_attention", "sliding_attention"
# For each field three values, of which a family takes those that its class has a field for.
FOLLOWED: dict[str, tuple[Any, Any, Any]] = {
    "vocab_size": (67, 89, 101),
    "hidden_size": (48, 64, 40),
    "intermediate_size": (56, 40, 72),
    "ffn_dim": (56, 40, 72),
    "num_hidden_layers": (1, 3, 2),
    "num_attention_heads": (4, 8, 2),
    "num_key_value_heads": (1, 4, 2),
    "head_dim": (8, 12, 32),
    "max_position_embeddings": (512, 96, 64),
    "original_max_position_embeddings": (8, 16, 32),
    "rms_norm_eps": (1e-5, 1e-3, 1e-2),
    "hidden_act": ("quick_gelu", "relu2", "mish"),
    "hidden_activation": ("quick_gelu", "relu2", "mish"),
    "activation_function": ("quick_gelu", "relu2", "mish"),
    "attention_bias": (True, False, True),
    "mlp_bias": (False, True, True),
    "enable_bias": (False, True, False),
    "use_bias": (True, False, True),
    "attention_out_bias": (True, False, True),
    "tie_word_embeddings": (True, False, True),
    "rope_parameters": (
        {**THETA, "rope_type": "linear", "factor": 3.0},
        {**THETA, "rope_type": "yarn", "factor": 6.0, "truncate": False},
        {**THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "sliding_window": (5, 9, 17),
    "use_sliding_window": (False, True, True),
    "max_window_layers": (0, 1, 1),
    "layer_types": ([NEAR], [WHOLE, NEAR, WHOLE], [NEAR, NEAR]),
    "sliding_window_pattern": (2, 3, 2),
    "no_rope_layers": ([0], None, [1, 0]),
    "no_rope_layer_interval": (4, 2, 3),
    "embedding_multiplier": (6.0, 0.5, 2.0),
    "attention_multiplier": (0.3, 0.1, 2.0),
    "residual_multiplier": (0.22, 1.5, 0.7),
    "logits_scaling": (8.0, 0.5, 3.0),
    "query_pre_attn_scalar": (17, 5, 40),
    "final_logit_softcapping": (3.0, None, 1.0),
    "attn_logit_softcapping": (2.0, None, 1.0),
    "num_experts": (4, 6, 3),
    "num_local_experts": (4, 6, 3),
    "num_experts_per_tok": (1, 3, 2),
    "moe_intermediate_size": (24, 40, 32),
    "shared_intermediate_size": (24, 40, 32),
    "position_embedding_type": ("rope", "rope", "rope"),
    "norm_topk_prob": (True, False, True),
    "decoder_sparse_step": (1, 2, 1),
    "mlp_only_layers": ([0], [], [1]),
    "shared_expert_intermediate_size": (24, 40, 32),
    "n_routed_experts": (4, 6, 3),
    "n_shared_experts": (1, 2, 1),
    "first_k_dense_replace": (0, 1, 2),
    "routed_scaling_factor": (1.0, 2.5, 0.5),
    "use_qk_norm": (True, False, True),
    "qkv_bias": (True, False, True),
    "layer_norm_eps": (1e-5, 1e-3, 1e-2),
    "intermediate_size_mlp": (48, 56, 72),
    "moe_layers": ([0], None, [1]),
    "interleave_moe_layer_step": (1, 2, 1),
    "attention_chunk_size": (8192, None, 512),
    "attn_temperature_tuning": (True, True, False),
    "floor_scale": (8, 16, 4),
    "attn_scale": (0.1, 0.5, 2.0),
    "logit_scale": (0.5, 2.0, 0.1),
    "swiglu_alpha": (1.0, 2.0, 3.0),
    "swiglu_limit": (1.0, 2.0, 0.5),
    "eos_token_id": (3, [4, 5], None),
    "bos_token_id": (3, 4, None),
    "pad_token_id": (7, 8, None),
    "dtype": ("float32", "float32", "float32"),
}
# Where a family takes other values than the rest.
OF_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "phi3": {
        "rope_parameters": (
            {**THETA, "rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 9.0] * 2},
            {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
            {**THETA, "rope_type": "longrope", "short_factor": [1.0] * 10, "long_factor": [1.5] * 10},
        )
    },
    "glm": {
        "rope_parameters": (
            {**THETA, "rope_type": "linear", "factor": 3.0},
            {**THETA, "rope_type": "default", "partial_rotary_factor": 1.0},
            {**THETA, "rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.25},
        )
    },
    # Without types the last layers have the window, and without a window none may slide.
    "qwen2": {"layer_types": ([WHOLE], None, [NEAR, NEAR])},
    "qwen3": {"layer_types": ([WHOLE], None, [NEAR, NEAR])},
    "gpt_oss": {"hidden_act": ("silu", "silu", "silu")},
    "gemma3_text": {
        "attn_logit_softcapping": (None, None, None),
        "rope_parameters": tuple(
            {WHOLE: {"rope_type": "linear", "rope_theta": theta, "factor": 3.0}, NEAR: {"rope_theta": 10 * theta}}
            for theta in (7e3, 8e3, 9e3)
        ),
    },
}
OF_FAMILY["glm4"] = OF_FAMILY["glm"]
# By layer; the output of attention is as wide as the hidden states; no experts, and no layers that do not attend.
OF_FAMILY["olmo3"] = {
    "rope_parameters": tuple(
        {WHOLE: {"rope_type": "yarn", "rope_theta": theta, "factor": 3.0}, NEAR: {"rope_theta": 10 * theta}}
        for theta in (7e3, 8e3, 9e3)
    )
}
OF_FAMILY["exaone4"] = {"layer_types": ([NEAR], [WHOLE, NEAR, WHOLE], None)}
OF_FAMILY["qwen2_moe"] = {"layer_types": ([WHOLE], None, [NEAR, NEAR])}
OF_FAMILY["smollm3"] = {"layer_types": ([WHOLE], None, [NEAR, WHOLE])}
OF_FAMILY["cohere2"] = {"layer_types": ([NEAR], [WHOLE, NEAR, WHOLE], None)}
OF_FAMILY["llama4_text"] = {
    "num_experts_per_tok": (1, 1, 1),
    "layer_types": ([WHOLE], None, [WHOLE, "chunked_attention"]),
    "rope_parameters": (
        {**THETA, "rope_type": "linear", "factor": 3.0},
        {**THETA, "rope_type": "default"},
        {**THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
}
OF_FAMILY["ministral3"] = {
    "rope_parameters": tuple(
        {**THETA, "rope_type": kind, "factor": 3.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": beta}
        for kind, beta in (("yarn", 0.1), ("linear", 0.5), ("yarn", 2.0))
    )
}
OF_FAMILY["helium"] = {"head_dim": (12, 8, 20)}
OF_FAMILY["granitemoehybrid"] = {
    "num_local_experts": (0, 0, 0),
    "layer_types": (["attention"], ["full_attention"] * 3, ["attention"] * 2),
    "mamba_n_heads": (4, 4, 4),
}
# Files of a fashion of their own: the family, what differs, and how many tokens its text has.
FASHIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "yarn of no original length": ("llama", {"rope_scaling": {"type": "yarn", "factor": 6.0}}, 40),
    "yarn of a factor that is null": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
        40,
    ),
    "llama3 of no original length": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        40,
    ),
    "longrope of no original length": (
        "llama",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [3.0] * 6}},
        40,
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 96),
    "an original length beside": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 6.0}, "original_max_position_embeddings": 16},
        40,
    ),
    "an empty scaling": ("gpt_oss", {"rope_scaling": {}}, 40),
    "a window that no text exceeds": ("gemma3_text", {"sliding_window": 96}, 40),
    "local rotations beside": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 7e3, "rope_local_base_freq": 100.0},
        40,
    ),
    "types of layers": ("mistral", {"layer_types": [WHOLE, NEAR, WHOLE]}, 40),
}
# Fields of which any value gives the same logits.
WITHOUT_EFFECT: dict[str, tuple[Any, Any, Any]] = {
    "architectures": (["A"], ["B", "C"], []),
    "transformers_version": ("4.0.0", "5.0.0", "6"),
    "id2label": ({"0": "x"}, {"0": "x", "1": "y"}, {"0": "z"}),
    "label2id": ({"x": 0}, {"x": 0, "y": 1}, {"z": 0}),
    "problem_type": ("regression", "multi_label_classification", None),
    "chunk_size_feed_forward": (1, 2, 64),
    "output_router_logits": (True, False, True),
    **dict.fromkeys(("output_hidden_states", "use_cache"), (True, False, True)),
    "return_dict": (True, True, True),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "dropout", "layerdrop"), (0.1, 0.5, 0.9)),
    **dict.fromkeys(("initializer_range", "init_std", "router_aux_loss_coef", "router_jitter_noise"), (0.01, 0.1, 0.9)),
    **dict.fromkeys(("pretraining_tp", "num_mtp_layers"), (2, 3, 4)),
    "residual_dropout": (0.1, 0.5, 0.9),
    "mamba_n_heads": (2, 8, 4),
    "mamba_d_head": ("auto", "auto", "auto"),
    **dict.fromkeys(("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_chunk_size"), (2, 8, 16)),
    "mamba_expand": (4, 1, 2),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), (True, False, True)),
    "time_step_limit": ([0.0, 1.0], [0.0, 2.0], None),
}
# Fields that may not have these values.
REFUSED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "use_bidirectional_attention": (True,),
    "do_layer_norm_before": (False,),
    "_remove_final_layer_norm": (True,),
    "layer_norm_elementwise_affine": (False,),
    "word_embed_proj_dim": (8, 16, 24),
    "n_group": (2, 3),
    "topk_group": (2, 3),
}


def fields(family: str) -> set[str]:
    return {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[family])}


def published(family: str, number: int) -> dict[str, Any]:
    """A configuration of whose fields each has its value of this number."""
    values = FOLLOWED | OF_FAMILY.get(family, {})
    found = {name: values[name][number] for name in sorted(fields(family) & values.keys())}
    return {"model_type": family, **found, "initializer_range": 0.2, "init_std": 0.2}


def model_of(file: dict[str, Any]) -> Any:
    """The model that transformers makes of a file, with random norms and biases: fresh ones are ones and zeros."""
    kind = "ministral" if file["model_type"] == "mistral" and "layer_types" in file else file["model_type"]
    config = transformers.AutoConfig.for_model(**copy.deepcopy(file) | {"model_type": kind})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            if parameter.ndim == 1 or "bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def logits(model: Any, length: int) -> np.ndarray:
    """What transformers or we make of a prompt of so many tokens."""
    tokens = np.random.default_rng(length).integers(9, 60, (1, length), dtype=np.int32)
    if isinstance(model, ckv.Model):
        return np.asarray(jax.jit(forward, static_argnums=1)(model.params, model.config, jnp.asarray(tokens)))
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def compare(reference: Any, folder: Path, file: dict[str, Any], length: int = 40, **options: Any) -> ckv.Model:
    """Ours of a file as transformers read it, written beside the weights of its model."""
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(file))
    model = ckv.load(folder, **options)
    want, got = logits(reference, length), logits(model, length)
    assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_has_values_here(family):
    assert not fields(family) - FOLLOWED.keys() - WITHOUT_EFFECT.keys() - REFUSED.keys()
    assert not registry.FAMILIES[family].file.without_effect - WITHOUT_EFFECT.keys() - FOLLOWED.keys()


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, marks=pytest.mark.exhaustive if family in COVERED and number != i % 3 else ())
        for i, family in enumerate(FAMILIES)
        for number in range(3)
    ],
)
def test_fields_that_are_followed(tmp_path, family, number):
    file = published(family, number)
    model = compare(model_of(file), tmp_path, file)
    stated = transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id
    ends = () if stated is None else (stated,) if isinstance(stated, int) else tuple(stated)
    assert model.config.eos_ids == tuple(end for end in ends if end < file["vocab_size"])


@pytest.mark.parametrize("fashion", FASHIONS)
def test_fashions(tmp_path, fashion):
    family, changes, length = FASHIONS[fashion]
    file = {name: value for name, value in published(family, 1).items() if name != "rope_parameters"}
    file |= {"head_dim": 12, **changes}
    compare(model_of(json.loads(json.dumps(file))), tmp_path, file, length)


def test_short_factors(tmp_path):
    file = published("phi3", 2)
    model = compare(model_of(file), tmp_path, file, 32, max_positions=32)
    assert model.config.rope != ckv.load(tmp_path).config.rope


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.exhaustive if name in COVERED else ()) for name in FAMILIES]
)
def test_fields_without_effect(family):
    """The same weights give the same logits there, and the same configuration here."""
    file = published(family, 1)
    model = model_of(file)
    plain, weights = logits(model, 20), model.state_dict()
    for number in range(3):
        free = fields(family) - registry.FAMILIES[family].file.assumed.keys()
        changed = file | {name: values[number] for name, values in WITHOUT_EFFECT.items() if name in free}
        assert registry.from_hf(changed) == registry.from_hf(file)
        other = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**copy.deepcopy(changed)), attn_implementation="eager"
        ).eval()
        other.load_state_dict(weights)
        np.testing.assert_array_equal(logits(other, 20), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_refused_by_name(family):
    of_family = {
        "gpt_oss": {"hidden_act": ("gelu", "relu", "tanh")},
        "gemma3_text": {"attn_logit_softcapping": (9.0,)},
        "granitemoehybrid": {"output_router_logits": (True,)},
    }
    values = {name: REFUSED[name] for name in fields(family) & REFUSED.keys()} | of_family.get(family, {})
    for name in sorted(values):
        for value in values[name]:
            with pytest.raises(ValueError, match=f"^config.json sets {name} = '?{value}'?, which is not supported"):
                registry.from_hf(published(family, 1) | {name: value})
