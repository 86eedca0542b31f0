"""`clusterkv convert`: the same model in Orbax's format, whole or not there, and every flaw of it in one sentence."""

import json
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli
from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints import orbax as orbax_files
from clusterkv_jax.checkpoints.loading import CheckpointError, load
from tests.support.checkpoint_files import EMBED, FAMILIES, HEAD, LLAMA, SINGLE, random_tensors, same, write

orbax = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint.experimental import v1  # noqa: E402

MODELS = {"llama": LLAMA, **FAMILIES}


@pytest.fixture
def small(monkeypatch):
    """Parts, pieces and chunks so small that a tiny model has many."""
    monkeypatch.setattr(convert, "PART", 30_000)
    monkeypatch.setattr(convert, "_CHUNK", 1024)
    monkeypatch.setattr(orbax_files, "_LEAST_PIECE", 256)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A converted Llama; tests that damage it take a copy."""
    folder = tmp_path_factory.mktemp("whole")
    source = write(folder / "source", LLAMA, random_tensors(LLAMA), shards=2)
    (source / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "PART", 30_000)
        patch.setattr(orbax_files, "_LEAST_PIECE", 256)
        assert convert.convert(source, folder / "target")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_that_of_safetensors(tmp_path, small, family, dtype):
    source = write(tmp_path / "source", MODELS[family], random_tensors(MODELS[family]), shards=2)
    convert.convert(source, tmp_path / "target", dtype=dtype)
    there, here = load(source, dtype=dtype), load(tmp_path / "target", dtype=dtype)
    assert same(there.params, here.params)
    assert here.config == there.config
    assert here.config.weights == there.config.weights


def test_the_type_of_the_embeddings_is_kept(tmp_path, small):
    source = write(tmp_path / "source", LLAMA, random_tensors(LLAMA, jnp.bfloat16))
    convert.convert(source, tmp_path / "target")
    assert {x.dtype for x in orbax_files.read_manifest(tmp_path / "target").tensors.values()} == {"bfloat16"}
    for dtype in (None, "float32", "bfloat16", "float16"):
        there, here = load(source, dtype=dtype), load(tmp_path / "target", dtype=dtype)
        assert same(there.params, here.params)
        assert here.config.weights == there.config.weights


@pytest.mark.parametrize(("both", "tied"), [(False, True), (True, False)])
def test_tied_embeddings(tmp_path, small, both, tied):
    """The files decide, and config.json is copied as it was."""
    tensors = random_tensors(LLAMA)
    if not both:
        del tensors[HEAD]
    source = write(tmp_path / "source", {**LLAMA, "tie_word_embeddings": True}, tensors)
    convert.convert(source, tmp_path / "target")
    model = load(tmp_path / "target")
    assert model.config.tie_embeddings == tied
    assert same(model.params, load(source).params)


def test_the_demo_model_with_tokenizer_and_calibration(tmp_path):
    progress = []
    convert.convert("demo", tmp_path / "demo", progress=lambda *numbers: progress.append(numbers))
    there, here = load("demo"), load(tmp_path / "demo")
    assert same(there.params, here.params)
    assert here.tokenizer.encode("Call me Ishmael.") == there.tokenizer.encode("Call me Ishmael.")
    assert here.calibration.settings == there.calibration.settings
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1]
    # Another calibration may take its place, as in every folder.
    (tmp_path / "demo" / "calibration.safetensors").unlink()
    assert load(tmp_path / "demo").calibration is None


def test_orbax_reads_it_too(whole):
    """All three of its ways, to which it is a dictionary of numpy arrays by name."""
    params = load(whole / "target").params
    for restore in (
        lambda: orbax.PyTreeCheckpointer().restore(whole / "target" / "weights" / "state"),
        lambda: orbax.StandardCheckpointer().restore(whole / "target" / "weights" / "state"),
        lambda: v1.load(whole / "target" / "weights"),
    ):
        found = restore()
        np.testing.assert_array_equal(found["layers.1.attention.q"], params["layers"][1]["attention"]["q"])
        assert len(found) == len(jax.tree.leaves(params))


def test_large_parameters_are_cut_along_what_a_mesh_splits(whole):
    tensors = orbax_files.read_manifest(whole / "target").tensors
    assert [(tensors[name].axis, len(tensors[name].digests)) for name in ("embed", "final_norm.scale")] == [
        (0, 32),
        (0, 1),
    ]
    layer = {name: tensors[f"layers.0.{name}"] for name in ("attention.q", "attention.k", "mlp.gate", "mlp.down")}
    assert {name: (x.axis, len(x.digests)) for name, x in layer.items()} == {
        "attention.q": (0, 8),
        "attention.k": (0, 4),
        "mlp.gate": (1, 16),
        "mlp.down": (0, 16),
    }


# --- a second call ---


def test_a_whole_target_is_recognised(whole):
    before = {path: path.stat().st_mtime_ns for path in (whole / "target").rglob("*")}
    assert not convert.convert(whole / "source", whole / "target")
    assert {path: path.stat().st_mtime_ns for path in (whole / "target").rglob("*")} == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda whole, target: target.mkdir(), "exists; a model is written to a free place"),
        (lambda whole, target: target.write_text("x"), "exists; a model is written to a free place"),
        (lambda whole, target: shutil.copytree(whole / "target", target), "holds another model, or another type"),
    ],
)
def test_a_target_that_is_something_else(tmp_path, whole, make, message):
    make(whole, tmp_path / "target")
    with pytest.raises(ValueError, match=message):
        convert.convert(whole / "source", tmp_path / "target", dtype="bfloat16")


def interrupted(monkeypatch, source, target, name, calls):
    """A conversion that ends with an exception at a call of conversion's function `name`."""
    function, count = getattr(convert, name), 0

    def failing(*arguments):
        nonlocal count
        count += 1
        if count == calls:
            raise RuntimeError("killed")
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(convert, name, failing)
        with pytest.raises(RuntimeError, match="killed"):
            convert.convert(source, target)


@pytest.mark.parametrize(
    ("name", "calls", "parts"),
    [("_save_part", 3, 2), ("_array", 9, 1), ("write_whole", 3, 1), ("_link", 5, 3), ("write_manifest", 1, 3)],
)
def test_an_interrupted_conversion_goes_on(tmp_path, small, monkeypatch, whole, name, calls, parts):
    """What was saved is not saved again, and until the end there is nothing to load."""
    target = tmp_path / "target"
    interrupted(monkeypatch, whole / "source", target, name, calls)
    assert not target.exists()
    saved, save = [], convert._save_part
    monkeypatch.setattr(convert, "_save_part", lambda *arguments: saved.append(save(*arguments)))
    convert.convert(whole / "source", target)
    assert len(saved) == 3 - parts
    assert same(load(target).params, load(whole / "source").params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_a_conversion_goes_on_with_the_same_model_only(tmp_path, small, monkeypatch, whole):
    interrupted(monkeypatch, whole / "source", tmp_path / "target", "_save_part", 3)
    with pytest.raises(ValueError, match="was begun with another model or type; remove it, or choose another name"):
        convert.convert(whole / "source", tmp_path / "target", dtype="bfloat16")


def test_two_at_a_time(tmp_path, small, whole):
    def second(done, _):
        with pytest.raises(ValueError, match="Another process is writing"):
            convert.convert(whole / "source", tmp_path / "target")

    convert.convert(whole / "source", tmp_path / "target", progress=second)


# --- damage ---


def damages(folder):
    """Every file that a flaw can be in, with what it does to it."""
    chance = random.Random(0)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        raw = file.read_bytes()
        yield file, "missing", None
        if raw:
            yield file, "cut", raw[: len(raw) // 2]
            for place in (0, len(raw) - 1, chance.randrange(len(raw))):
                yield file, f"flip at {place}", raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :]


def test_what_is_damaged_is_an_error_of_one_sentence_or_no_harm(tmp_path, whole):
    """Every file missing, cut in half, or with a byte changed."""
    target = tmp_path / "target"
    shutil.copytree(whole / "target", target)
    unbroken, errors = load(target), []
    for file, flaw, raw in list(damages(target)):
        original = file.read_bytes()
        file.unlink() if raw is None else file.write_bytes(raw)
        try:
            model = load(target)
        except CheckpointError as error:
            text = str(error)
            assert "\n" not in text, text
            assert str(target) in text or "manifest.json" in text, text
            assert text.endswith("."), text
            errors.append(file.name)
        else:
            assert same(model.params, unbroken.params), (file, flaw)
            assert (model.config, model.config.weights) == (unbroken.config, unbroken.config.weights), (file, flaw)
        file.write_bytes(original)
    assert {"config.json", "generation_config.json", "manifest.json", "manifest.ocdbt"} <= set(errors)


def test_a_changed_number_is_named(tmp_path, whole):
    target = tmp_path / "target"
    shutil.copytree(whole / "target", target)
    embed = np.asarray(load(target).params["embed"])
    for file in (path for path in target.rglob("*") if path.parent.name == "d"):
        raw = file.read_bytes()
        if (place := raw.find(embed[3].tobytes())) >= 0:
            file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    with pytest.raises(CheckpointError, match=r"embed in .*target is damaged: it does not have the checksum it was"):
        load(target)


def _edit(target, change):
    """A manifest that someone changed, checksum and all."""
    sealed = json.loads((target / "manifest.json").read_text())
    change(sealed["manifest"])
    sealed["checksum"] = orbax_files._checksum(sealed["manifest"])
    (target / "manifest.json").write_text(json.dumps(sealed))


FLAWS = {
    "another format": (
        lambda t: (t / "manifest.json").write_text('{"format": "x", "checksum": "", "manifest": {}}'),
        "manifest.json must be of format 'clusterkv_jax weights 1', got 'x'.",
    ),
    "another configuration": (
        lambda t: (t / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5.0})),
        "config.json is not the file that was converted: its checksum is another.",
    ),
    "a configuration of other shapes": (
        lambda t: (
            (t / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 65})),
            _edit(t, lambda m: m["files"].update({"config.json": orbax_files.file_digest(t / "config.json")})),
        ),
        "embed in {} has the shape [64, 32], its config.json implies [65, 32].",
    ),
    "a file that is gone": (
        lambda t: (t / "generation_config.json").unlink(),
        "manifest.json names 'generation_config.json', which is missing from {}.",
    ),
    "a file elsewhere": (
        lambda t: _edit(t, lambda m: m["files"].update({"../x": ""})),
        "manifest.json names '../x', which is missing from {}.",
    ),
    "a tensor that is gone": (lambda t: _edit(t, lambda m: m["tensors"].pop("embed")), "{} lacks embed [64, 32], "),
    "a type": (
        lambda t: _edit(t, lambda m: m["tensors"]["embed"].update(dtype="bfloat16")),
        "embed in {} is float32 [64, 32], manifest.json says bfloat16 [64, 32].",
    ),
    "pieces that do not divide": (
        lambda t: _edit(t, lambda m: m["tensors"]["embed"].update(digests=["a"] * 3)),
        "manifest.json: 3 digests do not divide axis 0 of embed [64, 32].",
    ),
    "no manifest": (lambda t: (t / "manifest.json").unlink(), "manifest.json is missing from {}."),
    "no weights": (lambda t: shutil.rmtree(t / "weights"), " in {} cannot be read: "),
    "no fingerprint": (
        lambda t: _edit(t, lambda m: m["fingerprints"].clear()),
        "field 'fingerprints': Object missing required field float32",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_are_named_in_one_sentence(tmp_path, whole, flaw):
    change, message = FLAWS[flaw]
    target = tmp_path / "target"
    shutil.copytree(whole / "target", target)
    change(target)
    with pytest.raises(CheckpointError) as error:
        load(target)
    assert message.format(target) in str(error.value)
    assert "\n" not in str(error.value)


# --- the command ---


def run(*arguments):
    return CliRunner().invoke(cli.app, ["convert", *map(str, arguments)], env={"COLUMNS": "300"})


def test_the_command(tmp_path, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(whole / "source", "./here")
    assert (result.exit_code, result.stdout) == (0, "Written to ./here\n")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert same(load("./here").params, load(whole / "target").params)
    result = run(whole / "source", tmp_path / "new", "--dtype", "bfloat16")
    assert (result.exit_code, result.stdout) == (0, f"Written to {tmp_path / 'new'}\n")
    result = run(whole / "source", tmp_path / "new", "--dtype", "bfloat16")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'new'} is whole already; nothing was done.\n")


def test_help_says_what_to_install():
    assert "pip install 'clusterkv-jax[pods]'" in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("source", "no/such/new"), "make it before a model is written there."),
        (("source", "gs://"), "A bucket and a folder follow gs://, got gs://."),
        (("source", "s3://bucket/new"), "A folder or a gs:// address is needed, got s3://bucket/new."),
        (("nothing", "new"), "There is no folder"),
        (("target", "new"), "is converted already."),
        (("source", "new", "--dtype", "int8"), "dtype 'int8' is not supported; allowed: float32, bfloat16, float16."),
        (("source/config.json", "new"), "is a file; give the folder that holds config.json, or a GGUF file."),
        (("source", "source"), "exists; a model is written to a free place."),
    ],
)
def test_mistakes(whole, monkeypatch, arguments, message):
    monkeypatch.chdir(whole)
    result = run("./" + arguments[0], *arguments[1:])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_numbers_that_are_not_finite(tmp_path, small):
    tensors = random_tensors(LLAMA)
    tensors[EMBED][3, 4] = np.nan
    source = write(tmp_path / "source", LLAMA, tensors)
    with pytest.raises(CheckpointError, match=f"{EMBED} in .*{SINGLE} holds nan"):
        convert.convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_disk_that_is_too_small(tmp_path, whole, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"target.started needs room for \d\S* GB, and the disk has 1e-06 GB left\."):
        convert.convert(whole / "source", tmp_path / "target")


def test_a_disk_that_fills(tmp_path, whole, monkeypatch):
    """tensorstore says it in a ValueError."""

    def full(_):
        raise ValueError("RESOURCE_EXHAUSTED: ... to file 50: No space left on device [os_error_code='28']")

    monkeypatch.setattr(convert, "_settings", full)
    with pytest.raises(OSError, match=r"target.started/00000 could not be written: the disk is full\."):
        convert.convert(whole / "source", tmp_path / "target")
    monkeypatch.undo()
    convert.convert(whole / "source", tmp_path / "target")


def test_without_orbax(tmp_path, whole, monkeypatch):
    """The base installation lacks it."""
    for name in ("orbax.checkpoint.experimental.v1", "tensorstore"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs the package 'orbax\S*': pip install 'clusterkv-jax\[pods\]'\."):
        convert.convert(whole / "source", tmp_path / "target")
    with pytest.raises(ValueError, match=r"needs the package 'tensorstore': pip install 'clusterkv-jax\[pods\]'\."):
        load(whole / "target")
