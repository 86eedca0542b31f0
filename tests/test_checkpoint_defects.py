"""Checkpoints that are broken: every defect is named in one sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clusterkv_jax.checkpoints import CheckpointError, load
from tests.support.checkpoint_files import INDEX, LLAMA, SINGLE, random_tensors, write


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


Q = "model.layers.1.self_attn.q_proj.weight"
DEFECTS = {
    "no config": (0, lambda f: _without(f, "config.json"), "config.json is missing from"),
    "config no JSON": (0, lambda f: _text(f, "config.json", "{"), "config.json is not a readable JSON file"),
    "config no UTF-8": (
        0,
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        "config.json is not a readable JSON file",
    ),
    "config a list": (0, lambda f: _text(f, "config.json", "[]"), "must hold a JSON object, got list"),
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
    "misshapen tensor": (
        0,
        lambda f: _tensors(f, **{Q: np.zeros((32, 16), np.float32)}),
        f"{Q} in ",
    ),
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
    "index no JSON": (3, lambda f: _text(f, INDEX, "nonsense"), "index.json is not a readable JSON file"),
    "index empty": (3, lambda f: _text(f, INDEX, "{}"), "has no 'weight_map' from tensors to files"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_named_in_one_sentence(tmp_path, defect):
    shards, damage, message = DEFECTS[defect]
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA), shards)
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if defect == "misshapen tensor":
        assert "has the shape [32, 16], its config.json implies [32, 32]" in str(error.value)


def test_an_index_that_places_a_tensor_wrongly(tmp_path):
    folder = write(tmp_path / "m", LLAMA, random_tensors(LLAMA), shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.absent.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places 'model\.absent\.weight' in .*, which does not hold it"):
        load(folder)
