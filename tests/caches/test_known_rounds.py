"""Rounds that the host knows, as a GPU runs them: their lists become shorter, and no row is lost."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import soft_matching
from clusterkv_jax.methods import orbitkv
from clusterkv_jax.methods.families import clustering
from tests.caches.test_by_head import same

ROWS = 600
FIFTH = ckv.Budget(ratio=0.2)
UNEQUAL = replace(FIFTH, shares=((1.6, 0.4),))
SMALL = {"sinks": 3, "recent": 5, "chunk": 16}
METHODS = {
    "CentroidKV": ckv.CentroidKV(FIFTH, **SMALL),
    "Chelsea": ckv.Chelsea(FIFTH, **SMALL, interval=16),
    "GravityKV": ckv.GravityKV(FIFTH, **SMALL),
    "OrbitKV": ckv.OrbitKV(FIFTH),
    "CentroidKV of rows": ckv.CentroidKV(ckv.Budget(tokens=90), **SMALL),
    "GravityKV, unequal heads": ckv.GravityKV(UNEQUAL, **SMALL),
    "OrbitKV, unequal heads": ckv.OrbitKV(UNEQUAL),
}


def compressed(method, lengths):
    """A layer's cache."""
    numbers = np.random.default_rng(0)
    keys, values = jnp.asarray(numbers.normal(size=(2, len(lengths), 2, ROWS, 8)), jnp.float32)
    scores = jnp.asarray(numbers.normal(size=(len(lengths), 2, ROWS)), jnp.float32)
    scores = scores if "scores" in method.needs(0) else None
    return ckv.compress(method, None, keys, values, np.asarray(lengths), max_new_tokens=40, scores=scores)


@pytest.mark.parametrize("lengths", [(ROWS,), (ROWS, 411, 233)], ids=["one", "unequal"])
@pytest.mark.parametrize("name", METHODS)
def test_known_rounds_lose_no_row(name, lengths, monkeypatch):
    want = compressed(METHODS[name], lengths)
    seen = []

    def recorded(*args, **options):
        seen.append(by_round(*args, **options))
        return seen[-1]

    by_round = soft_matching.rows_by_round
    monkeypatch.setattr(soft_matching, "rows_by_round", recorded)
    for module in (orbitkv, clustering):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    jax.clear_caches()
    same(compressed(METHODS[name], lengths), want)
    jax.clear_caches()
    assert any(2 * rows[-1] < ROWS for rows in seen), seen
