"""Replicas over devices and processes answer what one process answers."""

import json
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli
from clusterkv_jax.evaluation import work_queue
from clusterkv_jax.evaluation.batching import EvaluationBatch, Job, MethodEntry, shares
from clusterkv_jax.evaluation.replicas import Replica, ReplicaGroup, replicas, scatter
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.methods import Full
from tests.support import job as processes
from tests.support.job import answers, evaluated, stub
from tests.support.runs import in_turn

WRITTEN = {"results.jsonl", "results.jsonl.parts", "run.json", "table.md", "report.html"}


def device(number, process):
    return SimpleNamespace(id=number, process_index=process)


def test_the_longest_batches_come_first_and_loads_are_even():
    assert shares([1, 9, 5, 4, 4, 3], 2) == [[1, 4], [2, 3, 5, 0]]
    assert shares([3], 2) == [[0], []]


def test_replicas_lie_within_processes_where_they_fit():
    pod = [device(4 * process + i, process) for i in (3, 1, 0, 2) for process in (1, 0)]
    for mesh, lies in (("data=8", [[i // 4] for i in range(8)]), ("data=2,model=4", [[0], [1]])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("clusterkv_jax.evaluation.replicas.named_mesh", lambda text, devices: text)
            parts = replicas(mesh, pod)
        assert [part.processes for part in parts] == lies
        assert [device.id for part in parts for device in part.devices] == list(range(8))


def test_a_mesh_over_devices_of_this_process():
    parts = replicas("data=2,model=4")
    assert [part.mesh.devices.tolist() for part in parts] == [jax.devices()[:4], jax.devices()[4:]]
    assert [part.mesh for part in replicas("data=8")] == [None] * 8


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=3", "The mesh data=3 is for 3 devices, and 2 processes have 12."),
        ("data=3,model=4", "takes 4 devices and each process has 6; one of these numbers must divide the other."),
        ("model", "got 'model' in 'model'"),
    ],
)
def test_what_no_replicas_can_be_made_of(mesh, message):
    with pytest.raises(ValueError, match=message):
        replicas(mesh, [device(i, i // 6) for i in range(12)])


def test_replicas_of_one_process_answer_as_one_device(model, alone, tmp_path):
    said = evaluated(model, tmp_path, "--mesh", "data=4,model=2")
    assert answers(tmp_path) == alone
    assert "16 of 16 examples · " in said
    assert "tokens/s/chip" in said
    session = json.loads((tmp_path / "run.json").read_text())["sessions"][0]
    assert (session["mesh"], session["answers"]) == ("data=4,model=2", len(alone))
    assert session["seconds"] > 0


def test_a_bucket_for_the_model_and_the_results(model, alone, tmp_path, monkeypatch):
    pytest.importorskip("etils.epath")
    from tests.support.buckets import bucket

    shutil.copytree(model, tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bucket(tmp_path, "my-bucket"):
        said = evaluated("gs://my-bucket/model", "gs://my-bucket/results")
    assert "Written to gs://my-bucket/results:" in said
    assert answers(tmp_path / "results") == alone
    assert {file.name for file in (tmp_path / "results").iterdir()} == WRITTEN


def test_replicas_answer_at_the_same_time():
    """Each answer waits for one of the other replica."""
    everywhere = [Replica(i, (device(i, 0),), None) for i in range(2)]
    both = threading.Barrier(2, timeout=30)

    def respond(method, prompts, new, stop):
        return [Response(str(both.wait()))]

    entry = MethodEntry("full", "1.0", Full())
    jobs = [Job(i, Case(str(i), "t"), EncodedPrompt((1, 2, 3))) for i in range(8)]
    batches = [EvaluationBatch(entry, Full(), (job,)) for job in jobs]
    answers = scatter(ReplicaGroup(everywhere, [(replica, in_turn(respond)) for replica in everywhere]), batches)
    assert {batch.jobs[0].number for batch, _ in answers(batches)} == set(range(8))


class Board:
    """Texts that threads leave for each other."""

    def __init__(self):
        self.texts, self.news = {}, threading.Condition()

    def tell(self, name, text):
        with self.news:
            self.texts[name] = text
            self.news.notify_all()

    def hear(self, name):
        with self.news:
            assert self.news.wait_for(lambda: name in self.texts, timeout=30)
            return self.texts[name]

    def take(self, folder):
        with self.news:
            names = [name for name in self.texts if name.startswith(f"{folder}/")]
            return [(name.rsplit("/", 1)[1], self.texts.pop(name)) for name in names]


def test_batches_that_process_0_comes_upon_as_it_goes():
    method, board, loaded = Full(cache_dtype="int8"), Board(), []
    everywhere = [Replica(i, (device(i, i),), None) for i in range(3)]

    def team(process):
        def respond(given, prompts, new, stop):
            return [Response(f"{process} {given == method} {new} {stop}", rows=len(p.context)) for p in prompts]

        return ReplicaGroup(everywhere, [(everywhere[process], in_turn(respond))], process)

    def load(process, about):
        loaded.append(about)
        return MethodEntry("full", "1.0", method), lambda batches: team(process)

    others = [
        threading.Thread(target=work_queue.serve, args=(board, partial(load, process)), daemon=True)
        for process in (1, 2)
    ]
    for other in others:
        other.start()
    ours = work_queue.WorkQueue(board)
    ours.load({"model": "demo"})
    for size in (4, 1, 0, 2):
        jobs = [
            Job(i, Case(str(i), "t", max_new_tokens=5, stop=("\n",)), EncodedPrompt(tuple(range(9 + i))))
            for i in range(size)
        ]
        methods = [method, Full()] * 2
        batches = [EvaluationBatch(MethodEntry("full", "1.0", method), methods[job.number], (job,)) for job in jobs]
        answers = {batch.jobs[0].number: answer for batch, [answer] in ours.answers(team(0), batches)}
        assert [answers[i].rows for i in range(size)] == [9 + i for i in range(size)]
        said = [answers[i].text.split(" ", 1) for i in range(size)]
        assert [text for _, text in said] == [f"{i % 2 == 0} 5 ('\\n',)" for i in range(size)]
        assert len({process for process, _ in said}) == min(3, size)
    ours.end()
    for other in others:
        other.join(30)
        assert not other.is_alive()
    assert loaded == [{"model": "demo"}] * 2


def test_a_process_that_is_asked_to_end_ends_all_of_them(tmp_path):
    job = processes.Job(tmp_path / "results", stub)
    job.start(2)
    job.wait_for(lines=4)
    job.signal(signal.SIGTERM, 1)
    for code, said in job.ends():
        assert code == 75, said
        assert "Error: Process 1 (" in said
        assert "was asked to end (SIGTERM)." in said
    shutil.copy(job.folder / "results.jsonl", tmp_path / "before.jsonl")
    job.start(1)
    assert [code for code, _ in job.ends()] == [0]
    ids = [line["id"] for line in job.answers()]
    assert len(set(ids)) == len(ids) == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--process-id", "0"], "need --distributed."),
        (["--distributed", "--process-id", "0"], "are given together, or none of them."),
        (
            ["--distributed", "--coordinator-address", "h:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id is at most 1 with --num-processes 2, got 2.",
        ),
        (["--mesh", "model=3"], "The mesh model=3 is for 3 devices, and 1 processes have 8."),
        (["--output", "s3://bucket/results"], "A folder or a gs:// address is needed, got s3://bucket/results."),
    ],
)
def test_what_is_no_job(options, message):
    result = CliRunner().invoke(cli.app, ["evaluate", "--suite", "niah", "--output", "nowhere", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not Path("nowhere").exists()
