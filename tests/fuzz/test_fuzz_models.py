"""Files of models, saved caches and chat templates that are almost right: a result, or one sentence."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.cache import HeadGroups, KVCache, LayerCache
from clusterkv_jax.chat import cut_turn, turn
from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence
from tests.support.checkpoint_files import INDEX, LLAMA, SINGLE, random_tensors, write
from tests.support.tiny import tiny

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIG = {
    **LLAMA,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {**ROPE, "original_max_position_embeddings": 64},
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
WORDS = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "text": 2}, unk_token="[UNK]"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Every file that a model may have; the weights in three shards."""
    folder = write(tmp_path_factory.mktemp("models") / "m", CONFIG, random_tensors(CONFIG), shards=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "do_sample": True}))
    WORDS.save(str(folder / "tokenizer.json"))
    described = {"chat_template": TEMPLATE, "model_max_length": 128, "unk_token": "[UNK]", "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def read(folder):
    """What a command does with a model before it computes anything."""
    model = ckv.load(folder)
    if model.tokenizer is not None and getattr(model.tokenizer, "chat_template", None):
        cut_turn(model.tokenizer, "A text.", "Who?")
    return model


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
def test_files_of_a_model(checkpoint, name, data):
    file = checkpoint / name
    whole = file.read_bytes()
    try:
        file.write_bytes(data.draw(mutated(whole, "json")))
        one_sentence(lambda: read(checkpoint), says=[str(checkpoint)] * (name != "tokenizer_config.json"))
    finally:
        file.write_bytes(whole)
