"""Rounds that the host knows, as a GPU runs them: their lists become shorter, and no row is lost."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import soft_matching
from clusterkv_jax.methods import driver, orbitkv
from clusterkv_jax.methods.families import clustering
from clusterkv_jax.methods.plan import plan_layer, rows_of_request
from clusterkv_jax.methods.request import request_of_tensors
from clusterkv_jax.runtime.dispatch import TRAITS
from tests.caches.test_by_head import same

ROWS = 600
FIFTH = ckv.Budget(ratio=0.2)
SMALL = {"sinks": 3, "recent": 5, "chunk": 16, "interval": 16}
METHODS = {
    "centroids": ckv.CentroidKV(FIFTH, **SMALL),
    "less in later rounds": ckv.Chelsea(FIFTH, **SMALL),
    "scores": ckv.OrbitKV(FIFTH),
    "unequal heads": ckv.OrbitKV(replace(FIFTH, shares=((1.6, 0.4),))),
}


def compressed(method, lengths):
    """A layer after its prompt, and what is remembered; a prompt alone is known to be the longest."""
    numbers = np.random.default_rng(0)
    keys, values = jnp.asarray(numbers.normal(size=(2, len(lengths), 2, ROWS, 8)), jnp.float32)
    scores = jnp.asarray(numbers.normal(size=keys.shape[:3]), jnp.float32)
    whole = driver.LayerPrompt(None, keys, values, jnp.asarray(lengths), scores=scores)
    request = request_of_tensors(keys, values, np.arange(1, ROWS + 1), 1, 64)
    plan = plan_layer(method, 0, request)
    budgets = rows_of_request(method, plan, np.asarray(lengths), 0, request)
    if len(lengths) == 1:
        by_head = plan.by_head and replace(plan.by_head, exact=True)
        plan = replace(plan, groups=tuple(replace(group, exact=True) for group in plan.groups), by_head=by_head)
    return jax.jit(lambda key: driver.compress_layer(method, whole, budgets, plan, key)[:2])(jax.random.key(0))


@pytest.mark.parametrize("lengths", [(ROWS,), (ROWS, 411, 233)], ids=["one", "unequal"])
@pytest.mark.parametrize("name", METHODS)
def test_known_rounds_lose_no_row(name, lengths, monkeypatch):
    want, seen, by_round = compressed(METHODS[name], lengths), [], soft_matching.rows_by_round

    def recorded(*args, **options):
        seen.append(by_round(*args, **options))
        return seen[-1]

    monkeypatch.setattr(soft_matching, "rows_by_round", recorded)
    for module in (orbitkv, clustering):
        monkeypatch.setattr(module, "traits", lambda: TRAITS["gpu"])
    same(compressed(METHODS[name], lengths), want)
    assert any(2 * rows[-1] < ROWS for rows in seen), seen
