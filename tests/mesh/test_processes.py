"""A job of several processes that loses some of them ends with the unbroken run's answers, each of them once."""

import json
import signal
import time
from pathlib import Path

import jax
import pytest

from tests.support.job import ASKED, EXAMPLES, Job, answers, stub

RESTART = 75


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The answers of one process alone."""
    job = Job(tmp_path_factory.mktemp("unbroken"), stub)
    job.start(1)
    [(code, said)] = job.ends()
    assert code == 0, said
    assert len(job.answers()) == EXAMPLES
    return job.answers()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "results", stub)
    yield job
    job.stop()


def often(*numbers):
    """A case for runs that try everything."""
    return pytest.param(*numbers, marks=pytest.mark.exhaustive)


def goes_on(job, count, unbroken):
    """Starts the job again; it ends with all answers, in their order."""
    before = {line["id"] for line in answers(job.folder)}
    assert len(before) < EXAMPLES
    job.start(count)
    assert [code for code, _ in job.ends()] == [0] * count, job.stop()
    assert job.answers() == unbroken


@pytest.mark.parametrize(
    ("count", "victim", "again"), [(2, 1, 3), (3, 0, 1), often(4, 2, 1), often(2, 0, 2), often(4, 0, 2)]
)
def test_a_killed_process(job, unbroken, count, victim, again):
    job.start(count)
    job.wait_for(lines=6)
    job.signal(signal.SIGKILL, victim)
    for code, said in job.ends(*set(range(count)) - {victim}):
        assert code == RESTART, said
        assert f"Process {victim} (" in said
    goes_on(job, again, unbroken)


@pytest.mark.parametrize(("count", "again"), [(2, 1), often(4, 2)])
def test_all_are_asked_to_end(job, unbroken, count, again):
    job.start(count)
    job.wait_for(lines=6)
    job.signal(signal.SIGTERM)
    begin = time.monotonic()
    for code, said in job.ends():
        assert code == RESTART, said
        assert "was asked to end (SIGTERM)." in said
    assert time.monotonic() - begin < 10
    goes_on(job, again, unbroken)


@pytest.mark.parametrize(("count", "victim", "again"), [(2, 1, 1), often(4, 0, 2)])
def test_a_frozen_process(job, unbroken, count, victim, again):
    job.start(count)
    job.wait_for(lines=6)
    job.signal(signal.SIGSTOP, victim)
    for code, said in job.ends(*set(range(count)) - {victim}):
        assert code == RESTART, said
        assert f"Process {victim} (" in said
        assert "has not been heard of for 5 s." in said
    goes_on(job, again, unbroken)


def test_a_killed_process_whose_results_are_in_a_bucket(tmp_path, unbroken):
    """Each start is on machines that have nothing."""
    pytest.importorskip("etils.epath")
    cloud = tmp_path / "cloud"
    cloud.mkdir()

    def command(folder, address, count, index):
        return [*stub("gs://my-bucket/results", address, count, index), cloud]

    job, parts = Job(cloud / "results", command), cloud / "results" / "results.jsonl.parts"
    try:
        job.start(2, XDG_CACHE_HOME=tmp_path / "first")
        end = time.monotonic() + 60
        while not parts.is_dir() or len(list(parts.iterdir())) < 4:
            assert time.monotonic() < end, job.stop()
            time.sleep(0.01)
        job.signal(signal.SIGKILL, 0)
        [(code, said)] = job.ends(1)
        assert code == RESTART, said
        assert "process 1 of 2" in (cloud / "results" / "logs" / "process-1.log").read_text()
        job.start(2, XDG_CACHE_HOME=tmp_path / "second")
        assert [code for code, _ in job.ends()] == [0, 0], job.stop()
    finally:
        job.stop()
    assert job.answers() == unbroken
    sessions = json.loads((cloud / "results" / "run.json").read_text())["sessions"]
    assert [session.get("answers", EXAMPLES) < EXAMPLES for session in sessions] == [False, True]


# A replica for each process is what the pod of `test_pods.py` has.
@pytest.mark.parametrize("mesh", [often("data=2"), "model=2"])
def test_two_processes_answer_as_one(model, alone, tmp_path, mesh):
    cache = Path(jax.config.jax_compilation_cache_dir)
    options = ["--model", model, "--mesh", mesh, "--peer-timeout", 60, "--cache-folder", cache, "--distributed"]

    def command(folder, address, count, index):
        who = ["--coordinator-address", address, "--num-processes", count, "--process-id", index]
        return ["-m", "clusterkv_jax.cli", *ASKED, *options, "--output", folder, *who]

    job = Job(tmp_path / "results", command)
    job.start(2)
    assert [code for code, _ in job.ends()] == [0, 0], job.stop()
    assert job.answers() == alone
    [session] = json.loads((job.folder / "run.json").read_text())["sessions"]
    assert [process["devices"] for process in session["processes"]] == [1, 1]
    for index in range(2):
        assert "done" in (job.folder / "logs" / f"process-{index}.log").read_text()
