"""A converted model on meshes of eight fake devices: the numbers of one device, and each device reads its own part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints import orbax as orbax_files
from clusterkv_jax.checkpoints.loading import load
from clusterkv_jax.models.decoder import forward
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.runtime.sharding import fitted_mesh, named_mesh, on_mesh, param_shardings
from tests.support.checkpoint_files import FAMILIES, LLAMA, random_tensors, same, write
from tests.support.families import PUBLISHED

pytest.importorskip("orbax.checkpoint")

QWEN = {**FAMILIES["qwen2"], "num_key_value_heads": 2}  # two KV heads stay whole on each of eight devices


@pytest.fixture
def small(monkeypatch):
    """Pieces and chunks so small that a tiny model has many."""
    monkeypatch.setattr(convert, "_CHUNK", 1024)
    monkeypatch.setattr(orbax_files, "_LEAST_PIECE", 128)


@pytest.mark.parametrize("text", ["data=2,model=4", "model=8", "data=8", "sequence=2,model=4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("published", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_any_mesh_holds_the_model(tmp_path, small, text, dtype, published):
    source = write(tmp_path / "source", published, random_tensors(published), shards=2)
    convert.convert(source, tmp_path / "target", dtype=dtype)
    alone, many = load(source, dtype=dtype), load(tmp_path / "target", mesh=named_mesh(text), dtype=dtype)
    assert same(alone.params, many.params)
    assert many.config == alone.config
    assert many.config.weights == alone.config.weights
    assert many.mesh is not None
    shardings = param_shardings(abstract(many.config), fitted_mesh(many.mesh, many.config.num_kv_heads))
    assert jax.tree.all(jax.tree.map(lambda x, sharding: x.sharding == sharding, many.params, shardings))


# Each has parameters, or sums over devices, that the ones before it have not; the others with ARGS="-m exhaustive".
UNLIKE = ("llama", "olmo2", "gemma2", "phi3", "qwen3_moe", "glm4_moe", "gpt_oss", "cohere2", "opt")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in UNLIKE)) for name in PUBLISHED]
)
def test_families_compute_the_same_on_a_mesh(tmp_path, family):
    """Norms over all heads cross devices, and so do the parts of fused projections, and experts."""
    # Weights of a deviation of one would multiply what devices round.
    tensors = {name: 0.3 * x for name, x in random_tensors(PUBLISHED[family]).items()}
    folder = write(tmp_path / "m", PUBLISHED[family], tensors)
    alone, many = load(folder), load(folder, mesh=named_mesh("data=2,model=4"))
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    with on_mesh(many.mesh, many.config.num_kv_heads):
        logits = jax.jit(forward, static_argnums=1)(many.params, many.config, tokens)
    want = jax.jit(forward, static_argnums=1)(alone.params, alone.config, tokens)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


def test_each_device_reads_its_own_pieces_once(tmp_path, small, monkeypatch):
    """Of what is split over `model`, an eighth each; replicas over `data` share what was read."""
    source = write(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    convert.convert(source, tmp_path / "target")
    reads = []
    read = orbax_files.Pieces._whole_pieces

    def counted(self, first, last, rows):
        reads.append((self.where.split()[0], first * rows, last * rows))
        return read(self, first, last, rows)

    monkeypatch.setattr(orbax_files.Pieces, "_whole_pieces", counted)
    for text, parts in (("model=8", 8), ("data=2,model=4", 4)):
        reads.clear()
        load(tmp_path / "target", mesh=named_mesh(text))
        assert len(set(reads)) == len(reads)
        for name, size in (("embed", 64), ("layers.0.attention.q", 8), ("layers.1.mlp.gate", 48)):
            step = size // parts
            found = sorted(lines[1:] for lines in reads if lines[0] == name)
            assert found == [(i * step, (i + 1) * step) for i in range(parts)]
