"""Loops whose state changes rarely in another way: what they give, and how often they ask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkv_jax.runtime import control_flow
from clusterkv_jax.runtime.control_flow import while_with_maintenance

MOST = 12


def one_by_one(limit, every, start):
    """Numbers that grow by one, and are halved as soon as they reach `every`: the last one, how many steps, and of each
    of `MOST` steps the number before it and how often it was halved after it.
    """
    number, before, halved = start, [], []
    while len(before) < limit and number != 7:
        before.append(number)
        number += 1
        halved.append(number >= every)
        number = number // 2 if number >= every else number
    rest = MOST - len(before)
    return number, len(before), before + [-1] * rest, halved + [0] * rest


def looped(limit, every, start, short=0):
    """The same; `short` is how much too little room is told of, as long as there is any."""

    def room(state):
        return None if every is None else jnp.minimum(every - state[0], jnp.maximum(every - state[0] - short, 1))

    def step(state):
        number, steps, before, halved = state
        return number + 1, steps + 1, before.at[steps].set(number), halved

    def mend(state):
        number, steps, before, halved = state
        return number // 2, steps, before, halved.at[steps - 1].add(1)

    def running(state):
        return (state[1] < limit) & (state[0] != 7)

    numbers = jnp.full(MOST, -1, jnp.int32), jnp.zeros(MOST, jnp.int32)
    return while_with_maintenance(running, step, room, mend, (jnp.int32(start), jnp.int32(0), *numbers))


def same(state, expected):
    for found, wanted in zip(state, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_late_is_mended_after_the_step_that_made_it_so(platform, monkeypatch):
    """At the last step too, at the one after which nothing runs, and where there is more room than one is told of."""
    monkeypatch.setattr(control_flow, "platform", lambda: platform)
    run = jax.jit(looped)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, MOST), st.integers(1, 12), st.integers(0, 9), st.integers(0, 12))
    def check(limit, every, start, short):
        same(run(limit, every, start, short), one_by_one(limit, every, start))

    check()


@pytest.mark.parametrize("start", [4, 5, 40])
def test_without_room_at_the_start_one_step_comes_before_the_mend(start):
    number, steps, before, halved = jax.jit(looped)(1, 4, start)
    assert (int(number), int(steps), int(before[0]), halved.tolist()) == (
        (start + 1) // 2,
        1,
        start,
        [1] + [0] * (MOST - 1),
    )


def test_steps_between_two_mends_are_counted():
    """What room there is, is asked before and after a loop of steps, never in it."""
    asked = []

    def room(number):
        jax.debug.callback(lambda number: asked.append(int(number)), number)
        return 6 - number

    run = jax.jit(lambda start: while_with_maintenance(lambda x: x < 6, lambda x: x + 1, room, lambda x: x, start))
    assert int(run(jnp.int32(0))) == 6
    jax.effects_barrier()
    assert set(asked) == {0, 6}


def test_a_loop_that_is_never_late_is_one_loop():
    run = jax.jit(looped, static_argnums=1)
    number, steps, _, halved = run(5, None, 0)
    assert (int(number), int(steps), int(halved.sum())) == (5, 5, 0)
    assert [run.lower(5, every, 0).as_text().count("stablehlo.while") for every in (None, 3)] == [1, 2]
