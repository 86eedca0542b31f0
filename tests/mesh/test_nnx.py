"""Flax models on meshes: the tokens of our own model of the same weights, on one device."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import clusterkv_jax as ckv
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.methods import every_method, named
from tests.support.tiny import prompt

nnx = pytest.importorskip("flax.nnx", reason="models of flax: pip install 'clusterkv-jax[flax]'")

from tests.support.toy import as_llama, documented, enlarge  # noqa: E402  (needs flax)

HALF = ckv.Budget(ratio=0.5)
MESHES = ("model=8", "data=2,model=4", "data=4,model=2", "sequence=4,model=2")
METHODS = [
    ckv.Full(),
    *(method for method in every_method(HALF) if "scores" not in method.inputs(0)),
    ckv.Compactor(HALF, sinks=2, recent=2, chunk=16),
    ckv.KVzip(HALF, chunk=16, instruction=((3, 5), (7, 1, 4), (2,))),
    ckv.Quest(HALF, page=4, min_pages=2, dense_layers=0),
    ckv.ClusterKV(HALF, sinks=2, tokens_per_cluster=4, interval=4, interval_clusters=2, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, dense_layers=0),
]
CASES = [
    pytest.param(text, method, marks=[] if i % 10 == 0 and i // 10 % len(MESHES) == j else pytest.mark.exhaustive)
    for i, method in enumerate(METHODS)
    for j, text in enumerate(MESHES)
]
# Dimensions that share the model axis, where it divides them.
SPLIT = {"q": 1, "k": 1, "v": 1, "o": 0, "gate": 1, "up": 1, "down": 0, "head": 1, "embed": 0}


def laid_out(model, mesh):
    """The model's arrays over a mesh, as its author would lay them."""

    def place(path, x):
        at = next((SPLIT[part] for part in path if part in SPLIT), None)
        if at is None or x.shape[at] % mesh.shape["model"]:
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * at, "model")))

    def names(path):
        return [getattr(key, "key", getattr(key, "name", None)) for key in path]

    placed = jax.tree_util.tree_map_with_path(lambda path, x: place(names(path), x), nnx.state(model))
    nnx.update(model, placed)
    return model


@pytest.mark.parametrize(("text", "method"), CASES, ids=lambda x: x if isinstance(x, str) else named(x))
def test_tokens_are_those_of_our_own_model_on_one_device(text, method):
    mesh, toy = named_mesh(text), enlarge(documented()["Toy"](nnx.Rngs(0)))
    prompts, questions = [prompt(1, 48), prompt(2, 33)], [prompt(3, 5), prompt(4, 3)]
    asked = {"questions": questions, "max_new_tokens": 12}
    alone = ckv.generate(as_llama(toy), prompts, method=method, **asked)
    many = ckv.nnx.compressed(laid_out(toy, mesh), method, max_positions=256, mesh=mesh).generate(prompts, **asked)
    assert many.tokens == alone.tokens
    assert many.stats.kept_rows == alone.stats.kept_rows
