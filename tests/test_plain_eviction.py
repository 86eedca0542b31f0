"""Knorm and TOVA beside their definitions in NumPy, and what ties are decided by."""

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from tests.support.tiny import prompt, tiny

B, K, GROUP, N, D, ROWS = 2, 3, 2, 50, 16, 12
LENGTHS = [50, 37]


def tensors():
    rng = np.random.default_rng(3)
    return [rng.normal(size=(B, heads, N, D)).astype(np.float32) for heads in (K * GROUP, K, K)]


def kept(method, queries, keys, values):
    layer = ckv.compress(method, *map(jnp.asarray, (queries, keys, values)), lengths=np.asarray(LENGTHS))
    assert (np.asarray(layer.length) == ROWS).all()
    return np.asarray(layer.positions)[:, :, :ROWS]


def test_knorm_keeps_the_shortest_keys_of_each_head():
    queries, keys, values = tensors()
    positions = kept(ckv.Knorm(ckv.Budget(tokens=ROWS)), queries, keys, values)
    for b, length in enumerate(LENGTHS):
        for head in range(K):
            order = np.argsort(np.linalg.norm(keys[b, head, :length], axis=-1), kind="stable")
            np.testing.assert_array_equal(positions[b, head], np.sort(order[:ROWS]))


def last_attention(queries, keys, length):
    """Attention of the last query over the rows before it, mean of all query heads."""
    every = []
    for head in range(K * GROUP):
        scores = keys[head // GROUP, :length] @ queries[head, length - 1] / np.sqrt(D)
        weights = np.exp(scores - scores.max())
        every.append((weights / weights.sum())[:-1])
    return np.mean(every, axis=0)


def test_tova_keeps_what_the_last_token_attends_to_in_all_heads_alike():
    queries, keys, values = tensors()
    positions = kept(ckv.TOVA(ckv.Budget(tokens=ROWS)), queries, keys, values)
    for b, length in enumerate(LENGTHS):
        order = np.argsort(-last_attention(queries[b], keys[b], length), kind="stable")
        expected = np.sort([*order[: ROWS - 1], length - 1])
        np.testing.assert_array_equal(positions[b], np.broadcast_to(expected, (K, ROWS)))


def test_tova_of_the_paper_drops_a_row_for_each_token():
    result = ckv.generate(
        tiny(), [prompt(1, 40)], method=ckv.TOVA(ckv.Budget(tokens=8), decode_interval=1), max_new_tokens=6
    )
    assert {count for layer in result.stats.kept_rows for count in layer[0]} == {8}
    assert len(result.tokens[0]) == 6


def test_tova_needs_room_beside_the_last_row():
    with pytest.raises(ValueError, match=r"budget of 1 row.* which must be more than window = 1\.$"):
        ckv.compress(ckv.TOVA(ckv.Budget(tokens=1)), *map(jnp.asarray, tensors()))


def test_knorm_keeps_the_first_of_rows_that_only_rounding_tells_apart():
    """A token that stands twice has one norm in the first layer, whatever its position rotates it by."""
    rng = np.random.default_rng(0)
    token, angles = rng.normal(size=(1, 1, 1, D // 2, 2)), rng.uniform(0, 6, size=(1, K, N, D // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    keys = np.stack([token[..., 0] * cos - token[..., 1] * sin, token[..., 0] * sin + token[..., 1] * cos], axis=-1)
    keys = jnp.asarray(keys.reshape(1, K, N, D), jnp.float32)
    layer = ckv.compress(ckv.Knorm(ckv.Budget(tokens=ROWS)), None, keys, keys)
    np.testing.assert_array_equal(layer.positions, np.broadcast_to(np.arange(ROWS), (1, K, ROWS)))


def test_snapkv_keeps_the_same_rows_alone_and_in_a_batch_where_attention_is_even():
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.normal(size=(2, h, 80, 80)), jnp.float32) for h in (8, 2, 2))
    method, keys = ckv.SnapKV(ckv.Budget(tokens=33), window=8, kernel=5), 1e-6 * keys
    both = ckv.compress(method, queries, keys, values, lengths=np.asarray([41, 80]))
    alone = ckv.compress(method, queries[1:], keys[1:], values[1:])
    np.testing.assert_array_equal(both.positions[1, :, :33], alone.positions[0, :, :33])


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_lagkv_gives_ties_to_sinks_and_the_newest(scope):
    """A fifth of 100 rows is less than the last partition and what follows it, which tie."""
    keys = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 100, D)), jnp.float32)
    layer = ckv.compress(ckv.LagKV(ckv.Budget(tokens=20), lag=32, scope=scope), None, keys, keys)
    for head in range(2):
        rows = np.asarray(layer.positions)[0, head, : int(layer.length[0, head])].tolist()
        assert rows == [0, 1, 2, 3, *range(100 - len(rows) + 4, 100)]


@pytest.mark.parametrize(("sinks", "lag", "rows", "tokens"), [(16, 4, 29, 200), (0, 16, 21, 128), (4, 8, 30, 90)])
@pytest.mark.parametrize("equal", [True, False])
def test_lagkv_keeps_the_best_ranks_of_all_partitions(sinks, lag, rows, tokens, equal):
    """As argsort of argsort ranks them: of equal rows the last one of a partition is its best."""
    keys = np.random.default_rng(2).normal(size=(1, 2, 1 if equal else tokens, D))
    keys = jnp.asarray(np.broadcast_to(keys, (1, 2, tokens, D)), jnp.float32)
    layer = ckv.compress(ckv.LagKV(ckv.Budget(tokens=rows), sinks=sinks, lag=lag), None, keys, keys)
    scores = np.asarray(ckv.learned.lagkv(keys, keys, sinks=sinks, lag=lag))
    if equal:
        whole = (tokens - sinks) // lag - 1
        ranks = np.tile(np.arange(lag) / lag, whole)
        np.testing.assert_allclose(scores[0, 0, sinks : sinks + whole * lag], ranks)
    for head in range(2):
        best = np.argsort(-scores[0, head, ::-1], kind="stable")
        free = [tokens - 1 - at for at in best if tokens - 1 - at >= sinks]
        assert np.asarray(layer.positions)[0, head, :rows].tolist() == sorted([*range(sinks), *free[: rows - sinks]])
