"""Programs are dropped, the least recently used first, before the process has used up its memory mappings."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.generation.generate import compile_ahead
from clusterkv_jax.runtime import programs
from clusterkv_jax.runtime.sharding import named_mesh
from tests.support.tiny import prompt, tiny

pytestmark = pytest.mark.skipif(not programs.mappings(), reason="only Linux limits a process's memory mappings")
CORES = os.cpu_count() or 1
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
    """A process that has no programs, and where 100 mappings more than it has are half of what it is granted."""
    programs.make_room(0)
    limit, file = programs.mappings() + 100, tmp_path / "max_map_count"
    file.write_text(f"{2 * limit}\n")
    monkeypatch.setattr(programs, "_MOST_MAPPINGS", file)
    return limit


@programs.jit(decodes=True)
def raised(x):
    return x + 1


def test_decoding_has_options_of_its_own_where_the_compiler_of_gpus_takes_them(monkeypatch):
    """On one GPU others than on several, in a program of its own: options belong to the outermost one."""
    x = np.ones(3, np.float32)
    assert programs._compiler_options() == {}
    monkeypatch.setattr(programs, "platform", lambda: "gpu")
    assert programs._compiler_options() == programs.ON_ONE
    np.testing.assert_array_equal(raised(x), x + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: raised(x) * 2)(x), 2 * (x + 1))
    np.testing.assert_array_equal(jax.jit(lambda y: raised(x) * y)(2.0), 2 * (x + 1))
    with jax.set_mesh(named_mesh("model=2", jax.devices()[:2])):
        assert programs._compiler_options() == programs.ON_SEVERAL
        np.testing.assert_array_equal(raised(x), x + 1)
        np.testing.assert_array_equal(jax.jit(lambda y: raised(x) * y)(2.0), 2 * (x + 1))
    monkeypatch.setattr(programs, "ON_ONE", {"xla_gpu_no_such_option": True})
    assert programs._compiler_options() == {}


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
    caplog.set_level(logging.INFO, "clusterkv_jax.runtime.programs")
    first, again = answers(), answers()
    assert again == first
    dropped = [record.getMessage() for record in caplog.records]
    assert dropped
    assert all(f"more than {few}" in line for line in dropped)
    # What one program takes may come on top.
    assert programs.mappings() < few + 200


def test_nothing_is_dropped_while_there_is_room(caplog):
    caplog.set_level(logging.INFO, "clusterkv_jax.runtime.programs")
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


def test_what_threads_compile_is_what_a_request_runs():
    programs.make_room(0)
    options = {"method": METHODS[1], "max_new_tokens": 5, "questions": [prompt(2, 7)]}
    ahead = compile_ahead(tiny(), [prompt(1, 40)], **options)
    with programs.compilation() as after:
        ckv.generate(tiny(), [prompt(1, 40)], **options)
    assert ahead.programs > 5
    assert after.programs <= 1  # which sequences have ended, from the host


def test_an_error_of_a_thread_is_raised_where_it_is_waited_for(monkeypatch):
    class Broken:
        __name__ = "broken"
        out_info = ()

        def lower(self, *args):
            return self

        def compile(self):
            raise MemoryError("No room for a program.")

    reached = []
    with pytest.raises(MemoryError, match="No room"), programs.compilation():  # noqa: PT012
        programs.compiler()(Broken(), 1)
        reached.append(True)
    assert reached
    with programs.compilation() as nothing:
        pass
    assert nothing.programs == 0


def test_no_room_for_a_program_is_the_sentence_of_a_request(monkeypatch):
    def compile(lowered):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2.0GiB.")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    with pytest.raises(MemoryError, match="Out of device memory while generating from 1 x 40 tokens"):
        compile_ahead(tiny(), [prompt(1, 40)], method=METHODS[1], max_new_tokens=5)


def test_an_interrupt_begins_no_other_program():
    begun, release = [], threading.Event()

    class Slow:
        __name__ = "slow"
        out_info = ()

        def lower(self, *args):
            return self

        def compile(self):
            begun.append(True)
            release.wait(10)

    with pytest.raises(KeyboardInterrupt), programs.compilation():  # noqa: PT012
        compile = programs.compiler()
        for number in range(CORES + 9):
            compile(Slow(), number)
        raise KeyboardInterrupt
    release.set()
    assert len(begun) <= CORES


def test_requests_that_compile_the_same_at_once_get_the_same_answers():
    options = {"method": METHODS[1], "max_new_tokens": 5}
    expected = ckv.generate(tiny(), [prompt(3, 33)], **options).tokens
    programs.make_room(0)

    def answer(_):
        compile_ahead(tiny(), [prompt(3, 33)], **options)
        return ckv.generate(tiny(), [prompt(3, 33)], **options).tokens

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answer, range(3))) == [expected] * 3


def test_without_a_block_that_waits_a_program_is_compiled_at_once():
    programs.make_room(0)
    shape = programs.compiler()(turned, jax.ShapeDtypeStruct((9,), np.float32), 2)
    assert shape.shape == (9,)
    assert compiled_shape(9, 2) == 0


def compiled_shape(size, turns):
    with programs.compilation() as total:
        turned(np.ones(size, np.float32), turns)
    return total.programs


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [((), 0), (((1, 3),), 2), (((0, 1), (2, 4)), 3), (((5, 6), (0, 10)), 10), (((0, 4), (3, 6), (6, 7)), 7)],
)
def test_what_spans_share_counts_once(spans, seconds):
    assert programs.covered(spans) == seconds


def test_what_another_thread_compiles_for_itself_is_not_counted():
    other = threading.Thread(target=lambda: jax.jit(lambda x: x * 3 - 17)(jnp.ones(3)))
    with programs.compilation() as total:
        other.start()
        other.join()
    assert (total.seconds, total.programs) == (0, 0)
