"""A token that enters the heads of several groups and attends: checks, backends, broken variants, derivatives."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.test_util import check_grads

from clusterkv_jax.kernels.quantised import CODES, Quantised, dequantised, quantise
from clusterkv_jax.kernels.step_in_groups import pallas_gpu, reference
from tests.kernels.base import F32, changed, compiled, drawn, near, poisoned, tolerance
from tests.kernels.ops.biased_attention import CODED, attention_oracle

BACKENDS = {
    "xla": reference.step_in_groups,
    "gpu": partial(pallas_gpu.step_in_groups, sizes={"block": 16, "span": 32}, interpret=True),
}

# batch, query heads per KV head, KV heads of each group, slots of each group, head dim, dtype
STEP_SHAPES = [
    (2, 2, ((1,), (2, 0)), (70, 20), 24, jnp.float32),
    (1, 4, ((2,), (0,), (1,)), (33, 9, 17), 64, jnp.bfloat16),
    (2, 1, ((0,), (1,)), (70, 32), 16, jnp.float32),  # a head that is full may count one split too many
]
CODED_SHAPE = (2, 2, ((1,), (2, 0)), (70, 20), 32, jnp.float32)


def case(shape, seed, share, held, dtype=None):
    """The token, the groups' buffers and what their heads hold; what is empty is NaN."""
    batch, group, heads, slots, dim, own = shape
    rng, count = np.random.default_rng(seed), sum(map(len, heads))

    def draw(*sizes):
        return np.asarray(rng.normal(size=sizes), dtype or own)

    q, *new = draw(batch, 1, count * group, dim), draw(batch, count, 1, dim), draw(batch, count, 1, dim)
    real = rng.random((batch, 1)) < share
    token = np.asarray(rng.integers(100, 999, (batch, 1)), np.int32), real
    buffers, lengths = [], []
    for number, (mine, capacity) in enumerate(zip(heads, slots, strict=True)):
        length = np.asarray([[min(capacity, capacity * n // 7) for _ in mine] for n in held[:batch]], np.int32)
        degree = np.asarray(rng.integers(1, 9, (batch, len(mine), capacity)), np.float32)
        empty = np.arange(capacity) >= length[..., None]
        rows = [draw(batch, len(mine), capacity, dim) for _ in (0, 1)]
        numbers = np.asarray(rng.integers(0, 99, empty.shape), np.int32), np.asarray(draw(*empty.shape), np.float32)
        with_scores = number != 1  # a group may have none
        buffers.append((rows, np.where(empty, 0, degree), numbers[0], numbers[1] if with_scores else None, empty))
        lengths.append(length)
    return q, new, token, np.asarray(draw(batch, count, 1), np.float32), buffers, lengths


def check_step(implementation, *, shapes=STEP_SHAPES, examples=6):
    for shape in shapes:
        check_step_of(shape, implementation, examples)


def check_capped_step(implementation, *, examples=3):
    check_step_of(STEP_SHAPES[0], implementation, examples, soft_cap=0.7)


def check_step_of_tempered_degrees(implementation, *, examples=3):
    check_step_of(STEP_SHAPES[0], implementation, examples, power=0.5)


def check_step_of(shape, implementation, examples, power=1.0, **cap):
    batch, group, heads, _, dim, dtype = shape
    tempered = {} if power == 1 else {"degree_power": power}
    run = compiled(partial(implementation, heads=heads, **tempered, **cap))

    def check(seed, share, held):
        q, new, (position, real), score, buffers, lengths = case(shape, seed, share, held)
        dirty = [[poisoned(x, empty) for x in rows] for rows, *_, empty in buffers]
        given = tuple((*rows, *rest[:3]) for rows, (_, *rest) in zip(dirty, buffers, strict=True))
        out, lse, after, longer = run(q, *new, position, real, score, given, tuple(lengths))
        for got, length in zip(longer, lengths, strict=True):
            np.testing.assert_array_equal(got, length + real)
        assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
        want_out, want_lse = np.zeros(q.shape), np.zeros(q.shape[:3])
        for mine, old, now, length in zip(heads, given, after, lengths, strict=True):
            keys, values, degree, positions, scores = [None if x is None else np.array(x) for x in old]
            for b, (place, head) in [(b, each) for b in range(batch) for each in enumerate(mine)]:
                if real[b, 0] and length[b, place] < degree.shape[2]:
                    at = b, place, length[b, place]
                    keys[at], values[at], degree[at] = new[0][b, head, 0], new[1][b, head, 0], 1
                    positions[at] = position[b, 0]
                    if scores is not None:
                        scores[at] = score[b, head, 0]
            for got, want in zip(now, (keys, values, degree, positions, scores), strict=True):
                assert (got is None) == (want is None)
                if want is not None:
                    assert got.dtype == want.dtype
                    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
            queries = q.reshape(batch, 1, -1, group, dim)[:, :, list(mine)].reshape(batch, 1, -1, dim)
            exact = [np.asarray(x, np.float64) for x in (queries, keys, values, np.power(degree, power))]
            part = attention_oracle(*exact, length + real, **cap)
            index = [head * group + i for head in mine for i in range(group)]
            want_out[:, :, index], want_lse[:, :, index] = part[0], part[1]
        near(out, want_out, tolerance(dtype), axes=(1, 3))
        near(lse, want_lse, F32, axes=(1, 2))  # that of one row may be near 0

    held = st.lists(st.integers(0, 8), min_size=batch, max_size=batch)
    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([1.0, 0.5, 0.0]), held)


def check_coded_step(implementation, *, examples=3):
    for name in CODES:
        check_coded_step_of(name, implementation, examples)


def check_coded_step_of(name, implementation, examples):
    """Codes and scales go where rows go, and what they stand for is attended to."""
    batch, group, heads, _, dim, dtype = CODED_SHAPE
    run, store = compiled(partial(implementation, heads=heads)), compiled(partial(quantise, name=name))
    whole = compiled(dequantised)

    def check(seed, share, held):
        q, new, (position, real), score, buffers, lengths = case(CODED_SHAPE, seed, share, held)
        new = [store(x) for x in new]
        given = tuple((*(store(x) for x in rows), *rest) for rows, *rest, _ in buffers)
        dirty = tuple(
            (*(Quantised(x.codes, poisoned(np.asarray(x.scales), empty)) for x in rows[:2]), *rows[2:])
            for rows, (*_, empty) in zip(given, buffers, strict=True)
        )
        out, lse, after, _ = run(q, *new, position, real, score, dirty, tuple(lengths))
        want_out, want_lse = np.zeros(q.shape), np.zeros(q.shape[:3])
        for mine, old, now, length in zip(heads, given, after, lengths, strict=True):
            rows = []
            for place, fresh in enumerate(new):
                codes, scales = np.array(old[place].codes), np.array(old[place].scales)
                for b, (i, head) in [(b, each) for b in range(batch) for each in enumerate(mine)]:
                    if real[b, 0] and length[b, i] < scales.shape[2]:
                        codes[b, i, length[b, i]] = fresh.codes[b, head, 0]
                        scales[b, i, length[b, i]] = fresh.scales[b, head, 0]
                np.testing.assert_array_equal(np.asarray(now[place].codes).view(np.uint8), codes.view(np.uint8))
                filled = np.arange(scales.shape[2]) < (length + real)[..., None]
                np.testing.assert_array_equal(np.where(filled, now[place].scales, 0), np.where(filled, scales, 0))
                rows.append(np.asarray(whole(Quantised(jnp.asarray(codes), jnp.asarray(scales))), np.float64))
            queries = q.reshape(batch, 1, -1, group, dim)[:, :, list(mine)].reshape(batch, 1, -1, dim)
            part = attention_oracle(np.asarray(queries, np.float64), *rows, np.asarray(now[2], float), length + real)
            index = [head * group + i for head in mine for i in range(group)]
            want_out[:, :, index], want_lse[:, :, index] = part[0], part[1]
        near(out, want_out, CODED[dtype], axes=(1, 3))
        near(lse, want_lse, CODED[dtype], axes=(1, 2))

    held = st.lists(st.integers(0, 8), min_size=batch, max_size=batch)
    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([1.0, 0.5]), held)


def check_paged_step(implementation, *, examples=4, power=1.0):
    """Heads in pages of 16 slots: what enters, and attention, are those of each head's slots alone; two heads of the
    last sequence have none, as where no prompt ever came.
    """
    batch, group, page, pages, dim = 3, 2, 16, 8, 24
    first = np.asarray([[0, 3, 4], [0, 1, 2], [0, 0, 0]], np.int32)
    run = compiled(partial(implementation, heads=((0, 1, 2),), largest=128, degree_power=power))
    begins, ends = first * page, np.append(first[:, 1:], [[pages]] * batch, axis=1) * page

    def check(seed, share, held):
        rng = np.random.default_rng(seed)

        def draw(*shape):
            return np.asarray(rng.normal(size=shape), np.float32)

        q, new, score = draw(batch, 1, 3 * group, dim), [draw(batch, 3, 1, dim) for _ in (0, 1)], draw(batch, 3, 1)
        length = np.minimum(np.asarray(held, np.int32)[:, None] * (1, 3, 7), ends - begins).astype(np.int32)
        position, real = np.full((batch, 1), 777, np.int32), rng.random((batch, 1)) < share
        number = np.arange(pages * page)
        taken = np.any((number >= begins[..., None]) & (number < (begins + length)[..., None]), axis=1)
        rows = [poisoned(draw(batch, pages * page, dim), ~taken) for _ in (0, 1)]
        degree = np.where(taken, rng.integers(1, 9, taken.shape), 0).astype(np.float32)
        flat = [*rows, degree, rng.integers(0, 99, taken.shape).astype(np.int32), draw(*taken.shape)]
        given = tuple(x.reshape(batch, pages, page, *x.shape[2:]) for x in flat)
        out, lse, (after,), (longer,) = run(q, *new, position, real, score, (given,), (length,), first)
        np.testing.assert_array_equal(longer, length + real)
        want = [x.copy() for x in flat]
        for b, head in np.ndindex(*first.shape):
            begin, end, count = begins[b, head], ends[b, head], length[b, head]
            if real[b, 0] and begin + count < end:
                row = new[0][b, head, 0], new[1][b, head, 0], 1, 777, score[b, head, 0]
                for x, value in zip(want, row, strict=True):
                    x[b, begin + count] = value
            mine = [np.asarray(x[None, None, b, begin:end], np.float64) for x in (*want[:2], want[2] ** power)]
            asked = np.asarray(q[b : b + 1, :, group * head : group * (head + 1)], np.float64)
            part = attention_oracle(asked, *mine, np.asarray([[count + real[b, 0]]]))
            near(out[b : b + 1, :, group * head : group * (head + 1)], part[0], tolerance(jnp.float32), axes=(1, 3))
            near(lse[b : b + 1, :, group * head : group * (head + 1)], part[1], F32, axes=(1, 2))
        for got, expected in zip(after, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got).reshape(expected.shape), expected)

    held = st.lists(st.integers(1, 20), min_size=batch, max_size=batch)
    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([1.0, 0.5]), held)


def with_heads_in_the_groups_order(*operands, heads, **options):
    """The first group takes the model's first heads."""
    counts = np.cumsum([0, *map(len, heads)]).tolist()
    in_order = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(counts))
    return reference.step_in_groups(*operands, heads=in_order, **options)


def without_the_new_row(q, keys, values, position, real, scores, buffers, lengths, **options):
    """The token attends to the rows before it alone."""
    before = reference.step_in_groups(
        q, keys, values, position, jnp.zeros_like(real), scores, buffers, lengths, **options
    )
    after = reference.step_in_groups(q, keys, values, position, real, scores, buffers, lengths, **options)
    return *before[:2], *after[2:]


def check_paged_step_of_tempered_degrees(implementation, *, examples=2):
    check_paged_step(implementation, examples=examples, power=0.5)


def with_one_scale(q, keys, values, *others, **options):
    values = Quantised(values.codes, jnp.max(values.scales, axis=1, keepdims=True) + 0 * values.scales)
    return reference.step_in_groups(q, keys, values, *others, **options)


wrong = partial(changed, reference.step_in_groups)
CHECKS = [
    check_step,
    check_capped_step,
    check_step_of_tempered_degrees,
    check_coded_step,
    check_paged_step,
    check_paged_step_of_tempered_degrees,
]
BROKEN = {
    check_step: [
        with_heads_in_the_groups_order,
        without_the_new_row,
        wrong("with_padding_that_enters", real=lambda a: jnp.ones_like(a.real)),
        wrong("with_the_scores_of_the_first_head", new_scores=lambda a: a.new_scores[:, :1] + 0 * a.new_scores),
    ],
    check_capped_step: [wrong("without_soft_cap", soft_cap=None)],
    check_step_of_tempered_degrees: [wrong("without_tempering", degree_power=1.0)],
    check_coded_step: [wrong("with_keys_for_values", new_values=lambda a: a.new_keys), with_one_scale],
    check_paged_step: [wrong("with_the_slots_of_the_next_head", first=lambda a: a.first.at[:, 1:].add(1))],
    check_paged_step_of_tempered_degrees: [wrong("without_tempering", degree_power=1.0)],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_a_step_in_groups_has_derivatives(op):
    shape = (1, 2, ((1,), (0,)), (6, 4), 4, jnp.float32)
    q, new, (position, _), score, buffers, lengths = case(shape, 3, 1.0, [4])
    real, position, lengths = jnp.ones((1, 1), bool), jnp.asarray(position), [jnp.asarray(x) for x in lengths]

    @jax.jit
    def function(q, *rows):
        mine = [rows[2:4], rows[4:6]]
        given = tuple(
            (*pair, *map(jnp.asarray, rest[:2]), None) for pair, (_, *rest) in zip(mine, buffers, strict=True)
        )
        out, lse, after, _ = op(q, *rows[:2], position, real, score, given, tuple(lengths), heads=shape[2])
        return out, lse, [group[:2] for group in after]

    rows = [x for rows, *_ in buffers for x in rows]
    check_grads(function, (q, *new, *rows), order=1, modes=("fwd", "rev"), rtol=1e-2, atol=1e-3)
