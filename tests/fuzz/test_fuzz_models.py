"""Files of models, saved caches and chat templates that are almost right: a result, or one sentence."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

import clusterkv_jax as ckv
from clusterkv_jax import saving
from clusterkv_jax.cache.layers import HeadGroups, KVCache, LayerCache
from clusterkv_jax.checkpoints.loading import load_config
from clusterkv_jax.models import registry
from clusterkv_jax.models.hf_weights import file_shapes, layout
from clusterkv_jax.storage.digests import digest
from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence, read
from tests.support import families
from tests.support.checkpoint_files import INDEX, LLAMA, random_tensors, same, write
from tests.support.tiny import tiny

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED = {
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
# What families have of their own: windows, rotations, experts, multipliers; and texts in a wrapper.
PUBLISHED_OF = {
    **{published["model_type"]: published for published in (families.PUBLISHED | families.PARITY).values()},
    "gemma3": {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": families.PARITY["gemma3"]},
}
FILES = ("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json")
WORDS = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "text": 2}, unk_token="[UNK]"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Every file that a model may have; the weights in three shards."""
    folder = write(tmp_path_factory.mktemp("models") / "m", PUBLISHED, random_tensors(PUBLISHED), shards=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "do_sample": True}))
    WORDS.save(str(folder / "tokenizer.json"))
    described = {"chat_template": TEMPLATE, "model_max_length": 128, "unk_token": "[UNK]", "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
def test_files_of_a_model(checkpoint, name, data):
    file = checkpoint / name
    whole = file.read_bytes()
    try:
        file.write_bytes(data.draw(mutated(whole, "json")))
        model, _ = one_sentence(lambda: read(checkpoint))
        if model is not None:
            assert all(0 <= token < model.config.vocab_size for token in model.config.eos_ids)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("family", PUBLISHED_OF)
@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
def test_configurations_of_every_family(tmp_path_factory, family, data):
    """From the file to the names and shapes of all tensors."""
    folder = tmp_path_factory.getbasetemp() / family
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data.draw(mutated(json.dumps(PUBLISHED_OF[family]), "json")))

    def shapes():
        config = load_config(folder)
        return file_shapes(layout(config, registry.FAMILIES[config.family].weights))

    one_sentence(shapes)


@given(data=st.data())
def test_weights(checkpoint, data):
    """Whole or not at all: what is loaded is finite."""
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    try:
        file.write_bytes(data.draw(mutated(whole, "safetensors")))
        model, _ = one_sentence(lambda: ckv.load(checkpoint))
        assert model is None or all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model.params))
    finally:
        file.write_bytes(whole)


# --- saved caches ---

CONFIG, METHOD = tiny().config, ckv.Full()
STATE, COUNT = (({"seen": jnp.ones(3)}, None), (None,)), jnp.asarray([4])
ARRAYS = st.builds(
    np.full,
    st.sampled_from([(), (0,), (1,), (1, 1), (1, 2), (1, 1, 4), (1, 2, 4), (1, 1, 4, 8), (1, 2, 4, 8), (2,) * 6]),
    st.sampled_from([0, 1, 100]),
    st.sampled_from(["float32", "float16", "float64", "int32", "int64", "uint8", "bool"]),
)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A saved cache: a layer with groups of heads, one without, and what a method remembers."""
    path = tmp_path_factory.mktemp("caches") / "book"
    ckv.save_cache(path, KVCache((HeadGroups((rows(1), rows(1)), ((1,), (0,))), rows(2)), STATE, COUNT), CONFIG, METHOD)
    return path


def rows(heads):
    numbers = jnp.ones((1, heads, 4, 8))
    ones = jnp.ones((1, heads, 4))
    return LayerCache(numbers, numbers, ones, jnp.full((1, heads), 4), ones.astype(jnp.int32))


@given(data=st.data())
def test_saved_caches(book, tmp_path_factory, data):
    """A change is noticed, whatever it is, or changes nothing."""
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(data.draw(mutated(book.read_bytes(), "safetensors")))
    copy, _ = one_sentence(lambda: ckv.load_cache(path, CONFIG, METHOD), says=[str(path)])
    assert copy is None or same(copy, ckv.load_cache(book, CONFIG, METHOD))


@given(data=st.data())
def test_saved_caches_with_right_checksums(book, tmp_path_factory, data):
    """Metadata and arrays that someone else wrote."""
    path = tmp_path_factory.getbasetemp() / "signed"
    with safe_open(book, framework="np") as file:
        arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    name = data.draw(st.sampled_from(sorted(arrays)))
    if data.draw(st.booleans()):
        arrays[data.draw(st.sampled_from([name, "extra", "layers.0.0.x", "state.0.0.y"]))] = data.draw(ARRAYS)
        about = {**json.loads(metadata["about"]), "checksums": {name: digest(x) for name, x in arrays.items()}}
        text = json.dumps(about)
    else:
        text = data.draw(mutated(metadata["about"], "json")).decode("utf-8", "replace")
    save_file(arrays, path, metadata | {"about": text, "checksum": saving._checksum(text)})
    one_sentence(lambda: ckv.load_cache(path, CONFIG, METHOD))
