"""Programs are dropped, the least recently used first, before the process has used up its memory mappings."""

import logging
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import programs
from tests.support.tiny import prompt, tiny

pytestmark = pytest.mark.skipif(not programs.mappings(), reason="only Linux limits a process's memory mappings")
METHODS = (ckv.Full(), ckv.StreamingLLM(ckv.Budget(tokens=24)))


@programs.jit(static_argnames=("turns",))
def turned(x, turns):
    for turn in range(turns):
        x = jnp.sort(jnp.sin(x) + turn)
    return x


def compiled(turns):
    """How many programs a call makes."""
    with programs.compilation() as total:
        turned(np.ones(5, np.float32), turns)
    return total.programs


def answers():
    return [ckv.generate(tiny(), [prompt(1, 40)], method=method, max_new_tokens=4).tokens for method in METHODS]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A process that has no programs, and where 200 mappings more than it has are half of what it is granted."""
    programs.make_room(0)
    limit, file = programs.mappings() + 200, tmp_path / "max_map_count"
    file.write_text(f"{2 * limit}\n")
    monkeypatch.setattr(programs, "_MOST_MAPPINGS", file)
    return limit


def test_the_programs_dropped_are_those_longest_unused():
    programs.make_room(0)
    assert [compiled(turns) for turns in (1, 2, 3, 4, 1)] == [1, 1, 1, 1, 0]
    programs.make_room(programs.mappings() - 1)
    assert [compiled(turns) for turns in (1, 4, 2, 3)] == [0, 0, 1, 1]


def test_a_shape_has_a_program_of_its_own():
    programs.make_room(0)
    shapes = (4,), (6,), (4,), (2, 2)
    with programs.compilation() as total:
        counts = [(turned(np.ones(shape, np.float32), 1), total.programs)[1] for shape in shapes]
    assert counts == [1, 2, 2, 3]


def test_requests_that_need_more_mappings_than_there_are_get_the_same_answers(few, caplog):
    caplog.set_level(logging.INFO, "clusterkv_jax.programs")
    first, again = answers(), answers()
    assert again == first
    dropped = [record.getMessage() for record in caplog.records]
    assert dropped
    assert all(f"more than {few}" in line for line in dropped)
    # What one program takes may come on top.
    assert programs.mappings() < few + 200


def test_nothing_is_dropped_while_there_is_room(caplog):
    caplog.set_level(logging.INFO, "clusterkv_jax.programs")
    answers()
    with programs.compilation() as total:
        answers()
    assert total.programs == 0
    assert caplog.records == []


def test_a_system_without_mappings_keeps_everything(tmp_path, monkeypatch):
    compiled(5)
    monkeypatch.setattr(programs, "_MAPPINGS", tmp_path / "none")
    programs.make_room(0)
    assert programs.mappings() == 0
    assert compiled(5) == 0


def test_threads_may_call_what_another_drops(few):
    del few
    expected = [turned(np.ones(5, np.float32), turns) for turns in range(12)]

    def call(number):
        programs.make_room(0)
        return bool((turned(np.ones(5, np.float32), number % 12) == expected[number % 12]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(36)))
