"""Loading and writing checkpoints: every form of file met in the wild, every device its slice, what is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from clusterkv_jax.checkpoints import loading
from clusterkv_jax.checkpoints.loading import CheckpointError, load, load_config, save_huggingface
from clusterkv_jax.models import registry
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.text.tokenizer import encode
from tests.support.checkpoint_files import (
    EMBED,
    FAMILIES,
    HEAD,
    LLAMA,
    OPT,
    SINGLE,
    assert_holds,
    random_tensors,
    same,
    write,
)
from tests.support.processes import python

# --- forms of files ---


@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_single_and_sharded_files_of_every_type(tmp_path, stored, shards):
    tensors = random_tensors(LLAMA, jnp.dtype(stored))
    folder = write(tmp_path / "m", LLAMA, tensors, shards)
    assert_holds(load(folder).params, LLAMA, tensors, jnp.float32)
    assert_holds(load(str(folder), dtype=jnp.bfloat16).params, LLAMA, tensors, jnp.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    tensors = random_tensors(FAMILIES[family])
    folder = write(tmp_path / "m", FAMILIES[family], tensors, shards=2)
    assert_holds(load(folder).params, FAMILIES[family], tensors, jnp.float32)


def test_older_names_of_opt(tmp_path):
    tensors = random_tensors(OPT)
    older = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert older.keys().isdisjoint(tensors)
    assert_holds(load(write(tmp_path / "m", OPT, older)).params, OPT, tensors, jnp.float32)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_pos_emb.inv_freq"]
)
def test_stray_rotary_buffers_are_ignored(tmp_path, name):
    tensors = random_tensors(LLAMA)
    folder = write(tmp_path / "m", LLAMA, tensors | {name: np.ones(2, np.float64)})
    assert_holds(load(folder).params, LLAMA, tensors, jnp.float32)


def test_generation_config_names_the_ends(tmp_path):
    folder = write(tmp_path / "m", {**LLAMA, "eos_token_id": 2}, {})
    assert load_config(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_config(folder).eos_ids == (2, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [64, 7]}))
    with pytest.warns(UserWarning, match="eos_token_id = 64 is left out"):
        assert load_config(folder).eos_ids == (7,)


# --- tied embeddings ---


def _tie(published: dict[str, Any], stated: bool | None) -> dict[str, Any]:
    rest = {key: value for key, value in published.items() if key != "tie_word_embeddings"}
    return rest if stated is None else rest | {"tie_word_embeddings": stated}


@pytest.mark.parametrize("stated", [True, None])
def test_tied_with_only_the_embeddings_stored(tmp_path, stated):
    tensors = random_tensors(LLAMA)
    del tensors[HEAD]
    model = load(write(tmp_path / "m", _tie(LLAMA, stated), tensors))
    assert model.config.tie_embeddings
    assert "lm_head" not in model.params


def test_tied_with_only_the_head_stored(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors[EMBED]
    model = load(write(tmp_path / "m", _tie(LLAMA, True), tensors))
    assert "lm_head" not in model.params
    np.testing.assert_array_equal(model.params["embed"], tensors[HEAD])


def test_tied_with_both_stored(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors[HEAD] = tensors[EMBED]
    model = load(write(tmp_path / "m", _tie(LLAMA, True), tensors))
    assert "lm_head" not in model.params


def test_tied_by_the_configuration_but_two_tables_stored(tmp_path):
    """Transformers then keeps both, and so do we."""
    tensors = random_tensors(LLAMA)
    model = load(write(tmp_path / "m", _tie(LLAMA, True), tensors))
    assert not model.config.tie_embeddings
    assert_holds(model.params, LLAMA, tensors, jnp.float32)


def test_tie_not_stated_with_both_stored(tmp_path):
    """The family's default decides: Llama's is untied, OPT's is tied."""
    tensors = random_tensors(LLAMA)
    assert not load(write(tmp_path / "llama", _tie(LLAMA, None), tensors)).config.tie_embeddings
    tensors = random_tensors(OPT)
    tensors[HEAD] = tensors["model.decoder.embed_tokens.weight"]
    assert load(write(tmp_path / "opt", OPT, tensors)).config.tie_embeddings


def test_untied_without_a_head_is_an_error(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors[HEAD]
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight \[64, 32\]"):
        load(write(tmp_path / "m", LLAMA, tensors))


# --- devices, types, memory ---


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_receives_its_slice(tmp_path, kind):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    model, alone = load(folder, mesh=jax.make_mesh((8,), ("model",), axis_types=(kind,))), load(folder)
    assert model.mesh == jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    assert same(jax.device_get(model.params), alone.params)
    layer = model.params["layers"][0]
    assert layer["attention"]["q"].addressable_shards[0].data.shape == (1, 4, 32)
    assert layer["mlp"]["down"].addressable_shards[0].data.shape == (6, 32)
    assert model.params["embed"].addressable_shards[0].data.shape == (8, 32)


@pytest.mark.parametrize("dtype", ["int8", "float64", "half precision"])
def test_types_that_are_not_supported(tmp_path, dtype):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    with pytest.raises(ValueError, match=f"dtype '{dtype}' is not supported; allowed: float32, bfloat16, float16"):
        load(folder, dtype=dtype)


_LOAD = """
import sys, jax, pathlib
import clusterkv_jax as ckv

def read(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

ckv.load(sys.argv[1])  # imports, caches
before = read("VmRSS:")
params = ckv.load(sys.argv[2]).params
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(read("VmHWM:") - before, sum(sizes), max(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory of a process from /proc")
@pytest.mark.parametrize("shards", [0, 3])
def test_one_tensor_more_than_the_parameters(tmp_path, shards):
    """Peak memory of a process, mapped pages of the files included."""
    published = {**LLAMA, "hidden_size": 512, "vocab_size": 8192, "intermediate_size": 2048, "num_hidden_layers": 6}
    folder = write(tmp_path / "large", published, random_tensors(published, jnp.bfloat16), shards)
    small = write(tmp_path / "small", LLAMA, random_tensors(LLAMA))
    peak, parameters, largest = map(int, python("-c", _LOAD, small, folder).stdout.split())
    assert peak < parameters + largest + 10 * 2**20, (peak, parameters, largest)


def test_nothing_of_torch_is_needed(tmp_path):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    _add_tokenizer(folder)
    code = f"""
import sys
sys.modules["torch"] = None
import clusterkv_jax as ckv
model = ckv.load({str(folder)!r})
assert model.tokenizer("b a")["input_ids"] == [2, 1], model.tokenizer("b a")
"""
    assert "PyTorch" not in python("-c", code).stderr


def _add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokenizer(tmp_path):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    assert load(folder).tokenizer is None
    _add_tokenizer(folder)
    assert load(folder).tokenizer("a b c")["input_ids"] == [1, 2, 0]
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("<unk>", "<none>", 1))
    with pytest.raises(ValueError, match=r"^The tokenizer of '.*' fails: WordLevel error: Missing \[UNK\] token"):
        encode(load(folder).tokenizer, "a c", add_special_tokens=True)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_text("no such model")
    with pytest.warns(UserWarning, match="tokenizer is None"):
        assert load(folder).tokenizer is None


def test_the_end_of_text_that_only_the_tokenizer_names(tmp_path):
    folder = write(tmp_path / "m", {**LLAMA, "eos_token_id": None}, random_tensors(LLAMA))
    _add_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "b", "tokenizer_class": "TokenizersBackend"})
    )
    assert load(folder).config.eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert load(folder).config.eos_ids == (1, 2)


def test_the_longest_text_that_a_model_is_to_read(tmp_path):
    folder = write(tmp_path / "m", OPT, random_tensors(OPT))
    assert load(folder).config.max_positions == 128
    assert load(folder, max_positions=64).config.max_positions == 64
    with pytest.raises(ValueError, match=r"^max_positions must be .* from 1 to the model's 128, got 129\.$"):
        load(folder, max_positions=129)


def test_weights_have_a_fingerprint(tmp_path):
    tensors = random_tensors(LLAMA)
    folder, sharded = write(tmp_path / "m", LLAMA, tensors), write(tmp_path / "s", LLAMA, tensors, shards=3)
    others = write(tmp_path / "o", LLAMA, {name: 1.01 * tensor for name, tensor in tensors.items()})
    weights = load(folder).config.weights
    mesh = jax.make_mesh((8,), ("model",))
    assert [load(folder, mesh=mesh).config.weights, load(sharded).config.weights] == [weights, weights]
    assert len({weights, load(folder, dtype="bfloat16").config.weights, load(others).config.weights, None}) == 4
    assert load(folder).config == load(others).config  # programs are shared


# --- names ---


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "nothing", "a/b/c", Path("no/folder")])
def test_a_folder_that_does_not_exist(name):
    with pytest.raises(CheckpointError, match=r"There is no folder .*; allowed: 'demo', a local folder, or a hub id"):
        load(name)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a file; give the folder that holds config\.json"):
        load(tmp_path / SINGLE)


def test_hub_ids(tmp_path, monkeypatch):
    import huggingface_hub

    tensors = random_tensors(LLAMA)
    folder = write(tmp_path / "m", LLAMA, tensors)
    names = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: names.append(name) or str(folder))
    model = load("owner/some-model")
    assert (names, model.name) == (["owner/some-model"], "owner/some-model")
    assert_holds(model.params, LLAMA, tensors, jnp.float32)


def test_a_hub_that_does_not_answer():
    """The suite runs with the hub switched off, as a machine without network does."""
    with pytest.raises(
        CheckpointError, match="no local folder 'owner/no-such-model', and the hub did not deliver"
    ) as e:
        load("owner/no-such-model")
    assert "\n" not in str(e.value)


# --- writing ---


def test_what_is_written_is_read_again(tmp_path):
    published = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": [2, 3]}
    model = load(write(tmp_path / "m", published, random_tensors(published)))
    save_huggingface(tmp_path / "new", model.params, model.config, dtype="float32")
    again = load(tmp_path / "new")
    assert same(again.params, model.params)
    assert again.config == replace(model.config, dtype="float32")
    save_huggingface(tmp_path / "new", model.params, model.config)
    halved = load(tmp_path / "new", dtype="bfloat16")
    assert same(halved.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", SINGLE]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    model = load(write(tmp_path / "m", LLAMA, random_tensors(LLAMA)))

    def interrupted(tensors: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_huggingface(tmp_path / "new", model.params, model.config)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen3_is_read_again_and_computes_the_same(tmp_path, tied):
    published = {**FAMILIES["qwen3"], "tie_word_embeddings": tied, "rope_theta": 1e6, "eos_token_id": 1}
    model = load(write(tmp_path / "m", published, random_tensors(published)))
    save_huggingface(tmp_path / "new", model.params, model.config, dtype="float32")
    again = load(tmp_path / "new")
    assert again.config == replace(model.config, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 40), dtype=np.int32)
    logits, others = (jax.jit(forward, static_argnums=1)(m.params, m.config, tokens) for m in (model, again))
    np.testing.assert_array_equal(logits, others)


def test_what_transformers_reads_of_a_qwen3(tmp_path):
    from transformers import AutoConfig

    published = {**FAMILIES["qwen3"], "rope_theta": 1e6}
    config = replace(registry.from_hf(published), dtype="float32")
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), abstract(config))
    save_huggingface(tmp_path, params, config, dtype="float32")
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.model_type, theirs.architectures) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (theirs.head_dim, theirs.num_key_value_heads) == (config.head_dim, config.num_kv_heads)
    assert theirs.layer_types == ["full_attention"] * config.num_layers
    assert theirs.rope_parameters["rope_theta"] == 1e6


def test_only_llama_and_qwen3_are_written(tmp_path):
    config = registry.from_hf(FAMILIES["qwen2"])
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), abstract(config))
    with pytest.raises(ValueError, match="Only models of the families llama, qwen3 can be written, got 'qwen2'"):
        save_huggingface(tmp_path, params, config)
