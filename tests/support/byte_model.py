"""What models need whose tokens are bytes: a published configuration and a tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints import loading
from clusterkv_jax.models import llama
from tests.support.tiny import random_params

# One layer; 256 bytes and "<end>".
BYTES = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def byte_tokenizer() -> Tokenizer:
    """Bytes as GPT-2 writes them, in alphabetical order, then "<end>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ending_model(template: str | None = None) -> ckv.Model:
    """The same one, with a token that ends texts: what grammars need."""
    model = byte_model(template)
    model.tokenizer.add_special_tokens({"eos_token": "<end>"})
    return replace(model, config=replace(model.config, eos_ids=(256,)))


def byte_model(template: str | None = None, layers: int = 2) -> ckv.Model:
    """A random model whose tokens are bytes, in a chat template or without; none ends a text."""
    config = replace(llama.from_hf(BYTES | {"num_hidden_layers": layers}), eos_ids=())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), chat_template=template)
    return ckv.Model(random_params(config), config, tokenizer=tokenizer, mesh=None, name="bytes")


def byte_folder(folder: Path, template: str | None = None) -> Path:
    """A folder with such a model in Hugging Face's format."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config, tokenizer = llama.from_hf(BYTES), folder / "tokenizer.json"
    loading.save_huggingface(folder, random_params(config), config, tokenizer_json=tokenizer, dtype="float32")
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder
