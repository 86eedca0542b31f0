"""What every backend of the ops of recall must do: scores, groups, selections and gathers of rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.kernels.base import F32, drawn, near, normal, poisoned, tolerance

# --- scores of an index

# batch, KV heads, queries of one, entries, head dim, dtypes of queries and index
INDEX_SHAPES = [
    (2, 2, 3, 37, 24, jnp.bfloat16, jnp.float32),
    (1, 2, 4, 70, 128, jnp.float32, jnp.float32),
    (1, 1, 1, 5, 25, jnp.float32, jnp.bfloat16),
    (2, 1, 4, 70, 128, jnp.bfloat16, jnp.bfloat16),
    (1, 2, 3, 37, 24, jnp.float16, jnp.float16),
]


def check_index_scores(implementation, *, examples=3):
    for batch, heads, queries, entries, dim, asked, held in INDEX_SHAPES:
        for seed in range(examples):
            q = jnp.asarray(normal(seed, batch, heads, queries, dim), asked)
            index = jnp.asarray(normal(seed + 1, batch, heads, entries, dim), held)
            found = jax.jit(implementation)(q, index)
            assert found.dtype == jnp.float32
            expected = np.asarray(q, np.float64) @ np.asarray(index, np.float64).swapaxes(-1, -2)
            near(found, expected, F32, axes=3)


# --- rows by label

# batch, heads, rows, labels
GROUP_SHAPES = [(2, 2, 300, 5), (1, 2, 129, 200)]


def check_group(implementation, *, examples=6):
    for shape in GROUP_SHAPES:
        check_group_of(shape, implementation, examples)


def check_group_of(shape, implementation, examples):
    *shape, count = shape
    run = jax.jit(partial(implementation, count=count))

    def check(seed, used):
        labels = np.random.default_rng(seed).integers(-1, min(used, count), shape)
        labels[0, 0, : seed % 2 * 64] = -1  # a whole tile without a label
        order, starts = run(jnp.asarray(labels, jnp.int32))
        assert (order.dtype, starts.dtype) == (jnp.int32, jnp.int32)
        last = np.where(labels < 0, count, labels)
        np.testing.assert_array_equal(order, np.argsort(last, axis=-1, kind="stable"))
        np.testing.assert_array_equal(starts, (last[..., None] < np.arange(count + 1)).sum(axis=2))

    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([1000, 0, 1, 3]))


# --- the rows of the best clusters

# batch, heads, selections per head, clusters, rows wanted, sinks
SELECT_SHAPES = [(2, 2, 3, 37, 40, 3), (1, 2, 1, 150, 100, 0), (1, 1, 2, 70, 300, 16), (1, 1, 1, 20, 5, 9)]


def check_select(implementation, *, ordered=True, shapes=SELECT_SHAPES, examples=6):
    for shape in shapes:
        check_select_of(shape, implementation, ordered, examples)


def check_select_of(shape, implementation, ordered, examples):
    batch, heads, each, clusters, count, sinks = shape
    run = jax.jit(partial(implementation, count=count, sinks=sinks))

    def check(seed, levels, largest, room, active):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=(batch, heads, each, clusters))
        scores = np.full_like(scores, -np.inf) if levels == np.inf else np.round(scores * levels) / levels
        sizes = rng.integers(0, largest + 1, (batch, heads, clusters))
        starts = np.cumsum(sizes, axis=-1) - sizes
        order = rng.permuted(np.tile(np.arange(sinks, clusters * 9), (batch, heads, 1)), axis=-1)
        room = np.asarray(room[:batch])
        ints = [jnp.asarray(x, jnp.int32) for x in (sizes, starts, order, room)]
        ints[2] = ints[2] if ordered else None
        kept = jnp.full((batch, heads, each, count), 7, jnp.int32)
        given = () if active is None else (kept, jnp.asarray(active[:batch]))
        found = run(jnp.asarray(scores, jnp.float32), *ints, *given)
        assert found.dtype == jnp.int32
        assert found.shape == (batch, heads, each, count)
        for at in np.ndindex(batch, heads, each):
            if active and not active[at[0]]:
                np.testing.assert_array_equal(found[at], 7)
                continue
            head = at[:2]
            parts, left = [], max(room[at[0]] - sinks, 0)
            for c in np.argsort(-scores[at], kind="stable"):
                places = starts[(*head, c)] + np.arange(min(sizes[(*head, c)], left))
                parts.append((order[head][places] if ordered else places).tolist())
                left -= len(places)
            one_selection(np.asarray(found[at]).tolist(), [*range(min(sinks, count))], [part for part in parts if part])

    check(0, 1000, 8, [count - 7, 1], None)  # less room than clusters have rows, whatever is drawn
    levels = st.sampled_from([1, 1000, 1e30, np.inf])  # many ties, hardly any, far apart, all -inf
    rooms = st.lists(st.sampled_from([count, 1, 0, count - 7]), min_size=2, max_size=2)
    active = st.lists(st.booleans(), min_size=2, max_size=2)
    drawn(check, examples, st.integers(0, 2**16), levels, st.sampled_from([8, 0, 1]), rooms, active)


def one_selection(found, sinks, parts):
    """Sinks, then the parts of clusters, each in one piece, in any order; -1 behind."""
    by_first = {part[0]: part for part in parts}
    expected = list(sinks)
    while len(expected) < len(found) and found[len(expected)] in by_first:
        expected += by_first.pop(found[len(expected)])
    assert not by_first, f"rows of {len(by_first)} clusters are missing"
    assert found == expected + [-1] * (len(found) - len(expected))


# --- attention to rows by index


def check_recalled(implementation, *, examples=4):
    for each, dtype, unlisted in ((4, jnp.float32, 0), (1, jnp.float32, 20), (2, jnp.bfloat16, 3)):
        check_recalled_of(each, dtype, unlisted, implementation, examples)


def check_recalled_of(each, dtype, unlisted, implementation, examples):
    run = jax.jit(partial(implementation, unlisted=unlisted))

    def check(seed, holes, length, since):
        q, keys, values = (normal(seed + i, 2, 2, n, 24) for i, n in enumerate((4, 90, 90)))
        rng = np.random.default_rng(seed)
        rows = np.where(rng.random((2, 2, each, 70)) < holes, -1, rng.integers(0, 90, (2, 2, each, 70)))
        # What is not listed is listed nowhere: from row 60 on if there is anything.
        rows = np.where(rows < 0, -1, rows % 60) if unlisted else rows
        late = since + np.arange(unlisted)
        own = {}
        unread = np.ones((2, 2, 90), bool)
        for b, k, j in np.ndindex(2, 2, each):
            named = np.concatenate([rows[b, k, j], late])
            own[b, k, j] = named[(named >= 0) & (named < length)]
            unread[b, k, own[b, k, j]] = False
        arrays = [jnp.asarray(x, dtype) for x in (q, keys, values)]
        dirty = (poisoned(x, jnp.asarray(unread)) for x in arrays[1:])
        starts = jnp.full(2, since, jnp.int32) if unlisted else None
        end = None if length == 90 else jnp.full((2, 2), length, jnp.int32)
        out = run(arrays[0], *dirty, jnp.asarray(rows, jnp.int32), starts, end)
        assert out.dtype == dtype
        q, keys, values = (np.asarray(x, np.float64) for x in arrays)
        expected = np.zeros(q.shape)
        for b, k, g in np.ndindex(2, 2, 4):
            at = own[b, k, g * each // 4]
            score = keys[b, k, at] @ q[b, k, g] / np.sqrt(24)
            weight = np.exp(score - score.max(initial=-np.inf))
            expected[b, k, g] = weight @ values[b, k, at] / max(weight.sum(), 1e-30)
        near(out, expected, tolerance(dtype), axes=(2, 3))

    holes, length, since = (
        st.sampled_from([0.3, 0.0, 1.0]),
        st.sampled_from([90, 66, 40]),
        st.sampled_from([60, 65, 89]),
    )
    drawn(check, examples, st.integers(0, 2**16), holes, length, since)


# --- rows by index


def check_gather(implementation, *, examples=6):
    run = jax.jit(implementation)

    def row_of(source, at, number):
        return source[(*at[:2], number)] if 0 <= number < source.shape[2] else None

    def check(seed, rows, places, dtype):
        source, near = (jnp.asarray(normal(seed + i, 2, 3, n, 24), dtype) for i, n in enumerate((20, 5)))
        rows, places = (np.asarray(x, np.int32).reshape(2, 3, 4) for x in (rows, places))
        far, found = run(source, jnp.asarray(rows)), run(source, jnp.asarray(rows), near, jnp.asarray(places))
        assert far.dtype == found.dtype == dtype
        none = jnp.zeros(24, dtype)
        for at in np.ndindex(rows.shape):
            there, here = row_of(source, at, rows[at]), row_of(near, at, places[at])
            there = none if there is None else there
            np.testing.assert_array_equal(far[at], there)
            np.testing.assert_array_equal(found[at], there if here is None else here)

    row, place = st.sampled_from([-1, 0, 1, 18, 19, 20]), st.sampled_from([-1, 0, 4, 5])
    drawn(
        check,
        examples,
        st.integers(0, 2**16),
        st.lists(row, min_size=24, max_size=24),
        st.lists(place, min_size=24, max_size=24),
        st.sampled_from([jnp.float32, jnp.bfloat16]),
    )
