"""An engine on a mesh says what it says on one device, and compiles nothing once it is warm."""

import pytest

import clusterkv_jax as ckv
from tests.mesh.test_every_method import MESHES, METHODS, layers_for, model_on
from tests.mesh.test_sharding import CENTROID
from tests.support.methods import named
from tests.support.tiny import calmed, prompt, taught, untied

HALF = ckv.Budget(ratio=0.5)
# A kind of mesh each; the other pairs are tried with ARGS="-m exhaustive".
ORDINARY = [("model=8", CENTROID), ("data=2,model=4", ckv.Full()), ("sequence=4,model=2", ckv.H2O(HALF))]
CASES = [
    *ORDINARY,
    *(pytest.param(text, method, marks=pytest.mark.exhaustive) for method in METHODS for text in MESHES),
]


def said(model: ckv.Model, method) -> tuple[list[list[int]], int]:
    """Tokens of requests of several kinds, more than slots; programs compiled for the last of them."""
    engine = ckv.Engine(model, method=method, slots=4, max_tokens=160, reserve=64)
    context = engine.read(prompt(1, 48), max_new_tokens=9)
    handles = [engine.add(context, prompt(4, 3), max_new_tokens=9) for _ in range(3)]
    handles += [engine.add(prompt(seed, 33), prompt(3, 5), max_new_tokens=12) for seed in (2, 3)]
    engine.run()
    warm = engine.stats().programs
    handles += [engine.add(prompt(5, 40), prompt(3, 5), max_new_tokens=12), engine.add(prompt(6, 60), max_new_tokens=3)]
    engine.run()
    return [handle.result().tokens[0] for handle in handles], engine.stats().programs - warm


@pytest.mark.parametrize(("text", "method"), CASES, ids=lambda x: x if isinstance(x, str) else named(x))
def test_an_engine_on_a_mesh_says_what_it_says_on_one_device(text, method):
    layers = layers_for(method)
    alone, _ = said(calmed(untied(taught(4, layers)), method), method)
    tokens, programs = said(calmed(model_on(text, layers=layers), method), method)
    assert tokens == alone
    assert programs == 0
