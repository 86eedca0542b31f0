"""Loops whose state changes rarely in another way: what they give, and how often they ask."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkv_jax import conditions
from clusterkv_jax.conditions import repeated


def one_by_one(limit, every, start):
    """Numbers that grow by one, and are halved as soon as they reach `every`; how many steps, how many halvings."""
    number, steps, halved = start, 0, 0
    while steps < limit and number != 7:
        number, steps = number + 1, steps + 1
        if number >= every:
            number, halved = number // 2, halved + 1
    return number, steps, halved


def looped(limit, every, start):
    running = lambda x: (x[1] < limit) & (x[0] != 7)  # noqa: E731
    step = lambda x: (x[0] + 1, x[1] + 1, x[2])  # noqa: E731
    late = lambda x: None if every is None else x[0] >= every  # noqa: E731
    mend = lambda x: (x[0] // 2, x[1], x[2] + 1)  # noqa: E731
    return repeated(running, step, late, mend, tuple(jnp.int32(n) for n in (start, 0, 0)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_late_is_mended_after_the_step_that_made_it_so(platform, monkeypatch):
    """At the last step too, and at the one after which nothing runs."""
    monkeypatch.setattr(conditions, "platform", lambda: platform)
    run = jax.jit(looped)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 9))
    def check(limit, every, start):
        assert tuple(map(int, run(limit, every, start))) == one_by_one(limit, every, start)

    check()


def test_a_loop_that_is_never_late_is_one_loop():
    run = jax.jit(looped, static_argnums=1)
    assert tuple(map(int, run(5, None, 0))) == (5, 5, 0)
    assert [run.lower(5, every, 0).as_text().count("stablehlo.while") for every in (None, 3)] == [1, 2]
