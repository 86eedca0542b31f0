"""Checkpoints that are broken: every defect is named in one sentence."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clusterkv_jax.checkpoints import loading
from clusterkv_jax.checkpoints.loading import CheckpointError, load
from clusterkv_jax.storage.weight_files import ADAPTER
from tests.support.checkpoint_files import EMBED, INDEX, LLAMA, SINGLE, random_tensors, write

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _text(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def _truncate(folder: Path, name: str, size: int) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])


def _tensors(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / SINGLE)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE)


def _config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def _number(folder: Path, name: str, value: float) -> None:
    tensor = random_tensors(LLAMA)[name]
    tensor.flat[tensor.size // 2] = value
    _tensors(folder, **{name: tensor})


def _index(folder: Path, file: str, tensor: str = EMBED) -> None:
    """The index places a tensor in another file."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][tensor] = file
    (folder / INDEX).write_text(json.dumps(index))


def _outside(folder: Path, link: bool = False) -> None:
    """A shard beside the folder, or a link to it inside."""
    shard = folder / SECOND
    shutil.move(shard, folder.parent / SECOND)
    if link:
        shard.symlink_to(folder.parent / SECOND)


def _leaves(folder: Path) -> None:
    _outside(folder)
    _text(folder, INDEX, (folder / INDEX).read_text().replace(SECOND, f"../{SECOND}"))


def _twice(folder: Path) -> None:
    """A second shard holds a tensor that the index places in the first."""
    save_file({**load_file(folder / SECOND), EMBED: np.zeros((64, 32), np.float32)}, folder / SECOND)


SECOND = "model-00002-of-00003.safetensors"
NESTED = "[" * 200_000
GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
Q = "model.layers.1.self_attn.q_proj.weight"
DEFECTS = {
    "no config": (0, lambda f: _without(f, "config.json"), "config.json is missing from"),
    "config no JSON": (0, lambda f: _text(f, "config.json", "{"), "config.json is not valid JSON: Expecting"),
    "config no UTF-8": (
        0,
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        "config.json is not UTF-8 text: byte 0 is 0xff.",
    ),
    "config a list": (0, lambda f: _text(f, "config.json", "[]"), "config.json: Expected object, got array ([])."),
    "family": (0, lambda f: _text(f, "config.json", '{"model_type": "gpt2"}'), "model_type 'gpt2' is not supported"),
    "no weights": (0, lambda f: _without(f, SINGLE), f"neither {SINGLE} nor {INDEX}"),
    "truncated": (0, lambda f: _truncate(f, SINGLE, -100), "model.safetensors is not a complete safetensors file"),
    "cut header": (0, lambda f: _truncate(f, SINGLE, 100), "model.safetensors is not a complete safetensors file"),
    "empty file": (0, lambda f: (f / SINGLE).write_bytes(b""), "is not a complete safetensors file"),
    "missing tensor": (0, lambda f: _tensors(f, **{Q: None}), f"lacks {Q} [32, 32], which its config.json implies"),
    "extra tensor": (
        0,
        lambda f: _tensors(f, **{"model.layers.2.extra": np.zeros(3, np.float32)}),
        "holds model.layers.2.extra [3], which its config.json has no place for",
    ),
    "misshapen tensor": (0, lambda f: _tensors(f, **{Q: np.zeros((32, 16), np.float32)}), f"{Q} in "),
    "integer weights": (0, lambda f: _tensors(f, **{Q: np.zeros((32, 32), np.int8)}), "holds I8 weights; allowed: F32"),
    "missing shard": (
        3,
        lambda f: _without(f, "model-00002-of-00003.safetensors"),
        "in 'model-00002-of-00003.safetensors', which is missing from",
    ),
    "corrupt shard": (
        3,
        lambda f: _truncate(f, "model-00002-of-00003.safetensors", -7),
        "model-00002-of-00003.safetensors is not a complete safetensors file",
    ),
    "index no JSON": (3, lambda f: _text(f, INDEX, "nonsense"), "index.json is not valid JSON: Expecting value"),
    "index empty": (3, lambda f: _text(f, INDEX, "{}"), "index.json: Object missing required field weight_map"),
    "index of nothing": (3, lambda f: _text(f, INDEX, '{"weight_map": {}}'), "Expected object of length >= 1 ({})."),
    "index of numbers": (3, lambda f: _text(f, INDEX, '{"weight_map": {"x": 5}}'), "Expected str, got int."),
    "nested config": (0, lambda f: _text(f, "config.json", NESTED), "config.json is nested deeper than 32 levels."),
    "nested index": (3, lambda f: _text(f, INDEX, NESTED), "index.json is nested deeper than 32 levels."),
    "large config": (0, lambda f: _text(f, "config.json", " " * 2**25), "config.json is larger than 16 MiB"),
    "NaN in the config": (
        0,
        lambda f: _config(f, rms_norm_eps=float("nan")),
        "'rms_norm_eps': Expected float > 0.0 (nan).",
    ),
    "an infinite number of a family that is not read": (
        0,
        lambda f: _config(f, model_type="nemotron_h", time_step_limit=[0.0, float("inf")]),
        "model_type 'nemotron_h' is not supported; allowed: chatglm",
    ),
    "an infinite number": (0, lambda f: _config(f, rope_theta=float("inf")), "'rope_theta': Expected float"),
    "an adapter beside the weights": (0, lambda f: _text(f, ADAPTER, "{}"), "and adapters are not read; merge it into"),
    "GGUF alone": (
        0,
        lambda f: (f / "config.json").rename(f / "model-Q4.gguf"),
        "holds model-Q4.gguf and no config.json; give the GGUF file itself, ",
    ),
    "a pointer of Git LFS": (
        0,
        lambda f: _text(f, SINGLE, POINTER),
        "is a Git LFS pointer in the place of weights; run",
    ),
    "a million layers": (0, lambda f: _config(f, num_hidden_layers=10**6), "config.json, field 'num_hidden_layers'"),
    "many layers": (0, lambda f: _config(f, num_hidden_layers=1024), "and 9195 more tensors, which its"),
    "generation no JSON": (0, lambda f: _text(f, GENERATION, "{"), f"{GENERATION} is not valid JSON"),
    "generation a list": (0, lambda f: _text(f, GENERATION, "[]"), f"{GENERATION}: Expected object, got array ([])."),
    "generation text": (
        0,
        lambda f: _text(f, GENERATION, '{"eos_token_id": "</s>"}'),
        f"{GENERATION}, field 'eos_token_id': Expected int | array | null, got str ('</s>').",
    ),
    "tokenizer of nothing": (0, lambda f: _text(f, TOKENIZER, "{}"), f"{TOKENIZER} makes no tokenizer: "),
    "tokenizer no JSON": (0, lambda f: _text(f, TOKENIZER, "{"), f"{TOKENIZER} makes no tokenizer: "),
    "nested tokenizer": (0, lambda f: _text(f, TOKENIZER, NESTED), f"{TOKENIZER} makes no tokenizer: "),
    "tokenizer a list": (
        0,
        lambda f: _text(f, TOKENIZER_CONFIG, "[]"),
        f"{TOKENIZER_CONFIG}: Expected object, got array ([]).",
    ),
    "NaN": (0, lambda f: _number(f, Q, np.nan), f"{Q} in "),
    "infinity": (0, lambda f: _number(f, EMBED, -np.inf), "holds -inf; allowed: numbers that are finite as float32."),
    "the index leaves the folder": (3, _leaves, f"'../{SECOND}', which is missing from"),
    "the index is absolute": (
        3,
        lambda f: _index(f, str(f / "model-00001-of-00003.safetensors")),
        "model-00001-of-00003.safetensors', which is missing from",
    ),
    "a shard is a link": (3, lambda f: _outside(f, link=True), "which is a link to a file outside of"),
    "the index names the folder": (3, lambda f: _index(f, ".."), "'..', which is missing from"),
    "the index names no file": (3, lambda f: _index(f, "a\0b"), "which is missing from"),
    "another shard": (3, lambda f: _index(f, SECOND), f"places '{EMBED}' in '{SECOND}', which does not hold it."),
    "a tensor twice": (3, _twice, f"{SECOND} holds '{EMBED}', which {INDEX} does not place there."),
    "a long header": (0, lambda f: _text(f, SINGLE, "a" * 9), "has a header of more than 16 MiB"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_named_in_one_sentence(tmp_path, defect):
    shards, damage, message = DEFECTS[defect]
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA), shards)
    damage(folder)
    with warnings.catch_warnings(), pytest.raises(CheckpointError) as error:
        load(folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if defect == "misshapen tensor":
        assert "has the shape [32, 16], its config.json implies [32, 32]" in str(error.value)


@pytest.mark.parametrize("change", [{"mesh": jax.make_mesh((8,), ("model",))}, {"dtype": "bfloat16"}])
def test_numbers_that_are_not_finite_on_every_way_to_the_device(tmp_path, change):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    _number(folder, Q, np.nan)
    with pytest.raises(CheckpointError, match=f"{Q} in .*{SINGLE} holds nan; allowed: numbers that are finite as"):
        load(folder, **change)


def test_numbers_that_the_type_does_not_hold(tmp_path):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    _number(folder, Q, 1e6)
    assert float(jnp.max(load(folder, dtype="bfloat16").params["layers"][1]["attention"]["q"])) > 9e5
    with pytest.raises(CheckpointError, match=r"holds 1000000\.0; allowed: numbers that are finite as float16"):
        load(folder, dtype="float16")


def test_the_order_that_other_devices_are_given_is_looked_at_too():
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T
    copy = loading.host_copy(view, np.dtype(np.float32), "gpu", "x")
    assert copy.strides == view.strides
    np.testing.assert_array_equal(copy, view)
    with pytest.raises(CheckpointError, match=r"x holds inf"):
        loading.host_copy(np.where(view == 5, np.inf, view), np.dtype(np.float32), "gpu", "x")


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    """A snapshot links to files named by their content, in a folder beside it."""
    folder = write(tmp_path / "models--o--n" / "snapshots" / "abc", LLAMA, random_tensors(LLAMA), shards=2)
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.mkdir()
    for i, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        shutil.move(shard, blobs / str(i))
        shard.symlink_to(Path("../../blobs") / str(i))
    assert load(folder).config.num_layers == 2


@pytest.mark.parametrize(
    ("name", "shown"), [(5, "5"), (None, "None"), (b"demo", "b'demo'"), (["demo"], r"\['demo'\]"), ("x" * 9000, "'xxx")]
)
@pytest.mark.wrong_arguments
def test_what_names_no_model(name, shown):
    with pytest.raises(
        CheckpointError, match=rf"a hub id 'owner/name'.*{shown}|{shown}.*a hub id 'owner/name'"
    ) as error:
        load(name)
    assert len(str(error.value)) < 400


@pytest.mark.wrong_arguments
def test_what_is_no_mesh(tmp_path):
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh or None, got 'x'\."):
        load("demo", mesh="x")


def test_an_index_that_places_a_tensor_wrongly(tmp_path):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA), shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.absent.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places 'model\.absent\.weight' in .*, which does not hold it"):
        load(folder)
