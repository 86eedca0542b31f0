"""GravityKV: its rule written out, on one round, and what it is for."""

import jax.numpy as jnp
import numpy as np

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import from_tokens
from clusterkv_jax.soft_matching import merge_best, pick


def written_out(keys, values, degree, chunk, value_weight, gravity):
    """Best b and score of every a of one head, in double precision."""
    mu = (keys**2).sum(-1).mean()
    unit = values / np.linalg.norm(values, axis=-1, keepdims=True)
    best = []
    for a in range(0, len(keys), 2):
        start = a // chunk * chunk
        others = np.arange(start + 1, min(start + chunk, len(keys)), 2)
        distance = ((keys[a] - keys[others]) ** 2).sum(-1)
        score = -distance / (2 * mu) + value_weight * unit[others] @ unit[a]
        score = score + gravity * np.log2(degree[a] * degree[others])
        best.append((score.max(), a, others[score.argmax()]))
    return best


def test_a_round_merges_the_edges_of_the_rule():
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(2, 1, 2, 70, 8))
    degree = rng.integers(1, 9, size=(1, 2, 70)).astype(np.float32)
    method = ckv.GravityKV(ckv.Budget(tokens=50), sinks=3, recent=5, chunk=16, value_weight=0.7, gravity=0.2)
    layer = from_tokens(jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32), jnp.asarray([66]))
    layer = type(layer)(layer.keys, layer.values, layer.degree * degree, layer.length, layer.positions)
    behind = jnp.broadcast_to(jnp.arange(3, 66, dtype=jnp.int32), (*layer.length.shape, 63))
    squares = jnp.sum(jnp.square(layer.keys), axis=-1)
    *result, _ = merge_best(
        layer, behind, jnp.asarray([9]), (squares, None), sinks=3, recent=5, chunk=16, edges=method.edges
    )
    after = pick(*result, 3, 66)
    for head in range(2):
        middle = (x[0, head, 3:61] for x in (keys, values, degree))
        edges = sorted(written_out(*middle, 16, 0.7, 0.2), reverse=True)[:9]
        gone = {3 + a for _, a, _ in edges}
        rest = [row for row in range(66) if row not in gone]
        assert np.asarray(after.positions)[0, head, :57].tolist() == rest
        for b in {3 + b for _, _, b in edges}:
            rows = [b, *(3 + a for _, a, other in edges if 3 + other == b)]
            expected = np.average(keys[0, head, rows], axis=0, weights=degree[0, head, rows])
            np.testing.assert_allclose(after.keys[0, head, rest.index(b)], expected, atol=1e-5)
            assert after.degree[0, head, rest.index(b)] == degree[0, head, rows].sum()


def test_a_rare_row_stays_single_in_a_crowd():
    """Many rows of two kinds and one needle: the cosine of keys is blind to its length and its value."""
    rng = np.random.default_rng(2)
    direction = rng.normal(size=8)
    keys = direction + 0.1 * rng.normal(size=(1, 1, 200, 8))
    values = np.ones((1, 1, 200, 8)) + 0.1 * rng.normal(size=(1, 1, 200, 8))
    needle = 100
    keys[0, 0, needle] = 3 * direction
    values[0, 0, needle] *= -1
    tensors = (jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32))
    sizes = {"sinks": 4, "recent": 8, "chunk": 64}
    layer = ckv.compress(ckv.GravityKV(ckv.Budget(tokens=20), **sizes), None, *tensors)
    (at,) = np.flatnonzero(np.asarray(layer.positions)[0, 0] == needle)
    assert layer.degree[0, 0, at] == 1
    np.testing.assert_array_equal(layer.values[0, 0, at], tensors[1][0, 0, needle])
    other = ckv.compress(ckv.CentroidKV(ckv.Budget(tokens=20), **sizes), None, *tensors)
    spots = np.flatnonzero(np.asarray(other.positions)[0, 0] == needle)
    assert not len(spots) or other.degree[0, 0, spots[0]] > 1
