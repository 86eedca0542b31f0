"""GGUF files of several types, read by transformers on torch: the same logits and greedy tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models.decoder import forward
from tests.support import checkpoint_files, gguf_writer

torch = pytest.importorskip("torch", reason="the parity tests compare with transformers on torch: pip install torch")
from transformers import AutoModelForCausalLM  # noqa: E402

KINDS = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
# Rows of 256 numbers, which the K types need.
SIZES = {
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": {**SIZES, "model_type": "llama"},
    "qwen2": {**SIZES, "model_type": "qwen2"},
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "head_dim": 256,  # as all published ones; transformers takes it for granted
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
}


def tensors_of(published):
    """Weights of usual sizes; norms near 1."""
    found = checkpoint_files.random_tensors(published)
    offset = published["model_type"] != "gemma3_text"
    return {name: (offset + 0.1 * x) if "norm" in name else 0.06 * x for name, x in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(tmp_path, family, kind):
    published = FAMILIES[family]
    file = gguf_writer.write(tmp_path / "m.gguf", published, tensors_of(published), kind)
    model = ckv.load(file, weights="stored")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(3, 160, (1, 48))
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(ids.shape, dtype=torch.long)}
    with torch.no_grad():
        wanted = theirs(**given).logits.numpy()
        told = theirs.generate(**given, max_new_tokens=32, do_sample=False, eos_token_id=None)
    found = jax.jit(forward, static_argnums=1)(model.params, model.config, jnp.asarray(ids))
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())
    answer = ckv.generate(model, ids.tolist(), method=ckv.Full(), max_new_tokens=32)
    assert list(answer.tokens[0]) == told[0, 48:].tolist()
