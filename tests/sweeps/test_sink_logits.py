"""Every method counts the sink of each head: one that takes everything leaves nothing of the head."""

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import clusterkv_jax as ckv
from tests.support.methods import named
from tests.support.tiny import calmed, prompt, untied, with_sinks
from tests.sweeps.test_families import METHODS as EVERY

# Of each kind of step one, and one whose heads stand in groups.
FEW = ("Full", "CentroidKV", "H2O", "CaM", "StreamingLLM", "ClusterKV", "Chelsea")
# KVzip+ looks at the outputs' weights.
METHODS = [replace(method, plus=False) if isinstance(method, ckv.KVzip) else method for method in EVERY]
CASES = [
    pytest.param(method, marks=[] if named(method) in FEW else pytest.mark.exhaustive, id=named(method))
    for method in METHODS
]


@functools.cache
def without_two_heads(how: str) -> ckv.Model:
    """The second and the third of four heads add nothing: by their sinks, or by what is made of their outputs."""
    model, off = untied(with_sinks(layers=2)), jnp.asarray([False, True, True, False])
    layers = []
    for layer in model.params["layers"]:
        weights = layer["attention"]
        if how == "sinks":
            weights = weights | {"sink_logits": jnp.where(off, 1e4, weights["sink_logits"])}
        else:
            weights = weights | {"o": jnp.where(off[:, None, None], 0.0, weights["o"])}
        layers.append(layer | {"attention": weights})
    return replace(model, params=model.params | {"layers": tuple(layers)})


def answers(how: str, method: Any) -> list[list[int]]:
    model = calmed(without_two_heads(how), method)
    prompts, questions = [prompt(1, 40), prompt(2, 31)], [prompt(3, 5), prompt(4, 3)]
    return ckv.generate(model, prompts, method=method, questions=questions, max_new_tokens=8).tokens


@pytest.mark.parametrize("method", CASES)
def test_a_sink_takes_its_head_s_share(method):
    assert answers("sinks", method) == answers("outputs", method)
