"""The rows of the best clusters: checks, backends, broken variants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from clusterkv_jax.kernels.select_rows import pallas_gpu, reference
from tests.kernels.base import changed, compiled, drawn

BACKENDS = {
    "xla": reference.select_rows,
    "gpu": partial(pallas_gpu.select_rows, interpret=True),
    "gpu-marks": partial(pallas_gpu.select_rows, tuning={"marked": 1, "listed": 8}, interpret=True),
    "gpu-long-lists": partial(pallas_gpu.select_rows, tuning={"groups": 2, "few": 4, "listed": 8}, interpret=True),
}

# batch, heads, selections per head, clusters, rows wanted, sinks
SELECT_SHAPES = [(2, 2, 3, 37, 40, 3), (1, 2, 1, 150, 100, 0), (1, 1, 2, 70, 300, 16), (1, 1, 1, 20, 5, 9)]


def check_select(implementation, *, ordered=True, shapes=SELECT_SHAPES, examples=6):
    for shape in shapes:
        check_select_of(shape, implementation, ordered, examples)


def check_select_of(shape, implementation, ordered, examples):
    batch, heads, each, clusters, count, sinks = shape
    run = compiled(partial(implementation, count=count, sinks=sinks))

    def check(seed, levels, largest, room, active):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=(batch, heads, each, clusters))
        scores = np.full_like(scores, -np.inf) if levels == np.inf else np.round(scores * levels) / levels
        sizes = rng.integers(0, largest + 1, (batch, heads, clusters))
        starts = np.cumsum(sizes, axis=-1) - sizes
        order = rng.permuted(np.tile(np.arange(sinks, clusters * 9), (batch, heads, 1)), axis=-1)
        room = np.asarray(room[:batch])
        ints = [np.asarray(x, np.int32) for x in (sizes, starts, order, room)]
        ints[2] = ints[2] if ordered else None
        previous = np.full((batch, heads, each, count), 7, np.int32)
        rest = () if active is None else (previous, np.asarray(active[:batch]))
        result = run(np.asarray(scores, np.float32), *ints, *rest)
        assert result.dtype == jnp.int32
        assert result.shape == (batch, heads, each, count)
        result = np.asarray(result)
        for at in np.ndindex(batch, heads, each):
            if active and not active[at[0]]:
                np.testing.assert_array_equal(result[at], 7)
                continue
            head = at[:2]
            parts, space = [], max(room[at[0]] - sinks, 0)
            for c in np.argsort(-scores[at], kind="stable"):
                places = starts[(*head, c)] + np.arange(min(sizes[(*head, c)], space))
                parts.append((order[head][places] if ordered else places).tolist())
                space -= len(places)
            one_selection(result[at].tolist(), [*range(min(sinks, count))], [part for part in parts if part])

    check(0, 1000, 8, [count - 7, 1], None)  # less room than clusters have rows, whatever is drawn
    levels = st.sampled_from([1, 1000, 1e30, np.inf])  # many ties, hardly any, far apart, all -inf
    rooms = st.lists(st.sampled_from([count, 1, 0, count - 7]), min_size=2, max_size=2)
    active = st.lists(st.booleans(), min_size=2, max_size=2)
    drawn(check, examples, st.integers(0, 2**16), levels, st.sampled_from([8, 0, 1]), rooms, active)


def one_selection(selection, sinks, parts):
    """Sinks, then the parts of clusters, each in one piece, in any order; -1 behind."""
    by_first = {part[0]: part for part in parts}
    expected = list(sinks)
    while len(expected) < len(selection) and selection[len(expected)] in by_first:
        expected += by_first.pop(selection[len(expected)])
    assert not by_first, f"rows of {len(by_first)} clusters are missing"
    assert selection == expected + [-1] * (len(selection) - len(expected))


def select_of_scattered_rows(*args, sinks, **options):
    rows = reference.select_rows(*args, sinks=sinks, **options)
    return jnp.concatenate([rows[..., :sinks], jnp.sort(rows[..., sinks:], descending=True)], axis=-1)


wrong = partial(changed, reference.select_rows)
CHECKS = [check_select]
BROKEN = {
    check_select: [
        wrong(
            "of_equals_in_any_order",
            scores=lambda a: a.scores + 1e-5 * jax.lax.broadcasted_iota(jnp.float32, a.scores.shape, 3),
        ),
        wrong("of_one_row_too_many", room=lambda a: a.room + 1),
        wrong("for_all_batch_rows", kept=None, active=None),
        wrong("with_sinks_on_top", room=lambda a: a.room + a.sinks),
        select_of_scattered_rows,
    ]
}
