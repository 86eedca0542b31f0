"""Models at gs:// addresses: converted ones read by their pieces, safetensors tensor by tensor."""

import shutil
from pathlib import Path

import jax
import pytest

from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints.loading import CheckpointError, load
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.checkpoint_files import INDEX, LLAMA, random_tensors, same, write

pytest.importorskip("orbax.checkpoint")
from tests.support.buckets import bucket

DEMO = Path(__file__).parent.parent / "models" / "demo"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A bucket with the demo model in either format, and what was asked of it."""
    folder = tmp_path_factory.mktemp("cloud")
    shutil.copytree(DEMO, folder / "hf")
    convert.convert(DEMO, folder / "orbax")
    write(folder / "shards", LLAMA, random_tensors(LLAMA), shards=3)
    with bucket(folder, "my-bucket") as asked:
        yield folder, asked


@pytest.mark.parametrize("name", ["hf", "orbax"])
def test_the_model_is_the_one_of_the_folder(cloud, name):
    here, there = load("demo"), load(f"gs://my-bucket/{name}")
    assert same(here.params, there.params)
    assert there.config == here.config
    assert there.config.weights == here.config.weights
    assert there.tokenizer.encode("Call me Ishmael.") == here.tokenizer.encode("Call me Ishmael.")
    assert there.calibration.settings == here.calibration.settings


def test_onto_a_mesh(cloud):
    mesh = named_mesh("data=2,model=4")
    assert same(load("demo", mesh=mesh).params, load("gs://my-bucket/orbax", mesh=mesh).params)


def test_the_index_is_read_once(cloud):
    _, asked = cloud
    asked.clear()
    model = load("gs://my-bucket/orbax")
    assert len(asked) < 3 * len(jax.tree.leaves(model.params))


def test_shards(cloud):
    folder, _ = cloud
    assert same(load(folder / "shards").params, load("gs://my-bucket/shards").params)


def test_conversion_from_a_bucket(cloud, tmp_path):
    folder, _ = cloud
    convert.convert("gs://my-bucket/hf", tmp_path / "target")
    here, there = load(folder / "orbax"), load(tmp_path / "target")
    assert same(here.params, there.params)
    assert there.tokenizer is not None
    assert there.calibration is not None


def test_conversion_into_a_bucket(cloud, tmp_path, monkeypatch):
    folder, _ = cloud
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path)
    original = convert.copied

    def without_tokenizer(source, target):
        if target.name == "tokenizer.json":
            raise OSError("The connection is lost.")
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "copied", without_tokenizer)
        with pytest.raises(OSError, match="connection"):
            convert.convert("demo", "gs://my-bucket/new")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load("gs://my-bucket/new")
    with pytest.raises(ValueError, match="was begun with another model or type"):
        convert.convert("demo", "gs://my-bucket/new", dtype="float16")
    assert convert.convert("demo", "gs://my-bucket/new")
    assert same(load("demo").params, load("gs://my-bucket/new").params)
    assert not convert.convert("demo", "gs://my-bucket/new")
    assert {file.name for file in (folder / "new").iterdir()} == {file.name for file in (folder / "orbax").iterdir()}
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ValueError, match=r"^gs://my-bucket/hf exists; a model is written to a free place\.$"):
        convert.convert("demo", "gs://my-bucket/hf")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / INDEX).unlink(), "holds neither model.safetensors nor"),
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "which is missing from gs://my-bucket/broken."),
        (lambda f: _cut(f / "model-00002-of-00003.safetensors", 0.9), "is not a complete safetensors file"),
        (lambda f: _cut(f / "model-00002-of-00003.safetensors", 0.0), "is not a complete safetensors file"),
        (lambda f: (f / "config.json").unlink(), "There is no model in gs://my-bucket/broken: it lacks config.json."),
    ],
)
def test_broken_files_are_named(cloud, damage, message):
    folder, _ = cloud
    shutil.copytree(folder / "shards", folder / "broken")
    try:
        damage(folder / "broken")
        with pytest.raises(CheckpointError) as error:
            load("gs://my-bucket/broken")
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    finally:
        shutil.rmtree(folder / "broken")


def _cut(file, share):
    raw = file.read_bytes()
    file.write_bytes(raw[: int(share * len(raw))])
