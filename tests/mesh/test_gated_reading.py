"""Gated reading on meshes: as on one device."""

import pytest

import clusterkv_jax as ckv
from clusterkv_jax.runtime.sharding import named_mesh
from tests.mesh.test_every_method import HALF, TEXTS
from tests.mesh.test_sharding import placed
from tests.support.methods import named
from tests.support.tiny import calmed, prompt, taught, untied

ASKED = {"questions": [prompt(3, 5), prompt(4, 3)], "max_new_tokens": 6}
READ = {"reading": "gated", "window": 16, "chunk": 8}
KVZAP = ckv.KVzap(HALF, sinks=2, recent=4, decode_interval=8)
CENTROID = ckv.CentroidKV(HALF, sinks=2, recent=4, chunk=16, interval=8)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("model=8", KVZAP),
        pytest.param("data=2,model=4", CENTROID, marks=pytest.mark.exhaustive),
        pytest.param("sequence=4,model=2", KVZAP, marks=pytest.mark.exhaustive),
        pytest.param("model=8", CENTROID, marks=pytest.mark.exhaustive),
    ],
    ids=lambda x: x if isinstance(x, str) else named(x),
)
def test_a_gate_reads_as_on_one_device(text, method):
    model = calmed(untied(taught(4, 2)), method)
    alone, many = (
        ckv.generate(x, TEXTS, method=method, **ASKED, **READ) for x in (model, placed(model, named_mesh(text)))
    )
    assert many.tokens == alone.tokens
    assert many.stats.kept_rows == alone.stats.kept_rows
