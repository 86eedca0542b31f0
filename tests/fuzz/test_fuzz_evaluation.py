"""Wrong presets, calibrations, runs, results and rows of data: each is read, or refused in one sentence."""

import gzip
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoTokenizer

import clusterkv_jax as ckv
from clusterkv_jax import calibration
from clusterkv_jax.evaluation import records, runner
from clusterkv_jax.evaluation.report import table
from clusterkv_jax.evaluation.tasks import documents, sources, suites
from clusterkv_jax.evaluation.tasks.cases import build_prompt
from clusterkv_jax.evaluation.tasks.suites import Options
from clusterkv_jax.presets import preset
from clusterkv_jax.storage.digests import digest
from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence
from tests.test_evaluation_runner import ENTRIES, jobs, part

CONFIGS = Path(str(resources.files("clusterkv_jax.configs")))
HALF = ckv.Budget(ratio=0.5)


def read_or_refused(call: Callable[[], Any]) -> Any:
    """The result, or None where a file is refused in a sentence, or is not there."""

    def present() -> Any:
        try:
            return call()
        except OSError as error:
            if not error.filename:
                raise
            return None

    return one_sentence(present)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# --- presets and calibrations ---


@pytest.mark.parametrize("name", ["chelsea-llama3", "gravitykv-demo", "pyramidkv-kvpress"])
@given(data=st.data())
def test_presets(name, data, folder):
    sample = (CONFIGS / "methods" / f"{name}.yaml").read_text() + "budget: {ratio: 0.5, shares: [[1, 2], [2, 1]]}\n"
    calibrations = str(CONFIGS / "calibrations")
    (file := folder / "mine.yaml").write_bytes(
        data.draw(mutated(sample.replace("../calibrations", calibrations), "yaml"))
    )
    read_or_refused(lambda: preset(str(file)))


@given(data=st.data())
def test_calibrations(data, folder):
    sample = (CONFIGS / "calibrations" / "demo.yaml").read_text()
    (file := folder / "measured.yaml").write_bytes(data.draw(mutated(sample, "yaml")))
    if (measured := read_or_refused(lambda: calibration.read(file))) is not None:
        for method in (ckv.GravityKV, ckv.SnapKV, ckv.Chelsea):
            measured.applied(method(HALF))


MEASURED = Path(str(resources.files("clusterkv_jax.models"))) / "demo" / "calibration.safetensors"


@given(data=st.data())
def test_calibrations_with_a_surrogate(data, folder):
    """A change is noticed or changes nothing that a method asks."""
    (file := folder / "measured.safetensors").write_bytes(data.draw(mutated(MEASURED.read_bytes(), "safetensors")))
    applied_or_refused(file)


@given(data=st.data())
def test_calibrations_with_right_checksums(data, folder):
    """Numbers and arrays that someone else wrote."""
    file = folder / "signed.safetensors"
    with safe_open(MEASURED, framework="np") as opened:
        arrays, text = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()["calibration"]  # noqa: SIM118
    about = json.loads(text)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([*sorted(arrays), "0.inner_weights", "9.weights", "extra"]))
        shape = data.draw(st.sampled_from([(), (0,), (2,), (3,), (256, 2), (2, 256), (255, 2), (1, 2, 3)]))
        kind = data.draw(st.sampled_from(["float32", "float16", "float64", "int32", "bool"]))
        arrays[name] = np.full(shape, data.draw(st.sampled_from([0, 1, 100])), kind)
        about["checksums"] = {name: digest(x) for name, x in arrays.items()}
        text = json.dumps(about)
    elif data.draw(st.booleans()):
        about["numbers"] = data.draw(mutated(about["numbers"], "yaml")).decode("utf-8", "replace")
        text = json.dumps(about)
    else:
        text = data.draw(mutated(text, "json")).decode("utf-8", "replace")
    save_file(arrays, file, metadata={"calibration": text})
    applied_or_refused(file)


def applied_or_refused(file):
    """What is read serves methods, or has too little for their budget."""
    if (measured := read_or_refused(lambda: calibration.read(file))) is not None:
        for method in (ckv.OrbitKV, ckv.SnapKV, ckv.Chelsea):
            one_sentence(lambda method=method: measured.applied(method(HALF)))


# --- runs and their results ---


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of three methods with six examples: run.json and results.jsonl."""
    folder = tmp_path_factory.mktemp("ended")
    part(folder, ENTRIES, work=jobs(6))
    return folder


def resumed_or_joined(ended, folder, name, content):
    """The run with one file replaced goes on, is joined, and becomes a table; or is refused."""
    for each in (runner.RUN, runner.RESULTS):
        (folder / each).write_bytes(content if each == name else (ended / each).read_bytes())
    joint = read_or_refused(lambda: runner.join([folder]))
    if joint is not None:
        table.markdown(table.summarize(joint[1]))
    read_or_refused(lambda: part(folder, ENTRIES, work=jobs(6)))


@pytest.mark.parametrize(("name", "kind"), [(runner.RUN, "json"), (runner.RESULTS, "jsonl")])
@given(data=st.data())
def test_runs(name, kind, data, ended, folder):
    resumed_or_joined(ended, folder, name, data.draw(mutated((ended / name).read_bytes(), kind)))


@given(data=st.data())
def test_packed_results(data, ended, folder):
    """Damaged before they are packed, or after."""
    raw = (ended / runner.RESULTS).read_bytes()
    before = mutated(raw, "jsonl").map(lambda changed: gzip.compress(changed, 1, mtime=0))
    (file := folder / "results.jsonl.gz").write_bytes(data.draw(before | mutated(gzip.compress(raw, mtime=0), "bytes")))
    read_or_refused(lambda: list(records.read_answers(file)))


# --- data sets ---

LONGBENCH = {"context": "Some text.", "answers": ["one"], "all_classes": None, "length": 2, "input": "What?"}
DIVIDED = {"context": "Some text.", "question": "What?", "answer_prefix": " It is"}
RULER = DIVIDED | {"task": "vt", "answer": "['one', 'two']", "max_new_tokens": 30, "index": 3}
WHOLE = {"input": "Grass. What is the special magic uuid for x? The special magic uuid", "outputs": ["1"], "index": 0}
SHOTS = json.dumps([{"question": "One?", "target": "So. The answer is 1."}] * 2)
GSM8K = {"question": "What is one?", "answer": "So.\n#### 1,000"}
NUMBERED = LONGBENCH | {"answers": ["Paragraph 3"]}
FILES = {
    "gsm8k": ("gsm8k", {"cot_8shot.json": SHOTS, "test.jsonl": [GSM8K]}, "test.jsonl", ()),
    "gsm8k's examples": ("gsm8k", {"cot_8shot.json": SHOTS, "test.jsonl": [GSM8K]}, "cot_8shot.json", ()),
    "longbench": ("longbench", {"lcc.jsonl": [LONGBENCH]}, "lcc.jsonl", ("lcc",)),
    "longbench by number": ("longbench", {"passage_count.jsonl": [NUMBERED]}, "passage_count.jsonl", ()),
    "longbench divided": ("longbench", {"trec.jsonl": [NUMBERED | DIVIDED]}, "trec.jsonl", ("trec",)),
    "longbench-official": ("longbench-official", {"trec.jsonl": [LONGBENCH]}, "trec.jsonl", ("trec",)),
    "ruler-rows": ("ruler-rows", {"vt_4096.jsonl": [RULER]}, "vt_4096.jsonl", ()),
    "ruler-rows whole": ("ruler-rows", {"niah_multikey_3_4096.jsonl": [WHOLE]}, "niah_multikey_3_4096.jsonl", ()),
    "ruler-papers": ("ruler-papers", {"ruler_4096.jsonl": [RULER] * 5}, "ruler_4096.jsonl", ()),
    "wikitext": ("wikitext", {"book.txt": "One sentence after another. " * 40}, "book.txt", ()),
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_rows(name, data, tmp_path_factory, tokenizer):
    suite, files, damaged, tasks = FILES[name]
    folder = tmp_path_factory.getbasetemp() / name.replace("'", "")
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        raw = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        kind = file.rsplit(".")[-1].replace("txt", "bytes")
        (folder / file).write_bytes(data.draw(mutated(raw, kind)) if file == damaged else raw.encode())

    def prompts():
        for case in suites.cases(suite, Options(tasks=tasks, data=str(folder), lengths=(4096,)), tokenizer, 8192):
            if len(case.context) < 10_000:
                build_prompt(case, tokenizer, 8192)

    read_or_refused(prompts)


SQUAD = {
    "data": [
        {
            "title": "T",
            "paragraphs": [{"context": "A text.", "qas": [{"question": "What?", "answers": [{"text": "A text"}]}]}],
        }
    ]
}
SQUAD_ROW = {"context": "A text.", "question": "What?", "answers": {"text": ["A text"], "answer_start": [0]}}
HOTPOT = {"question": "Which?", "answer": "one", "context": [["Title", ["One.", " Two."]], ["Other", ["Three."]]]}
HOTPOT_ROW = HOTPOT | {"context": {"title": ["Title", "Other"], "sentences": [["One."], ["Two.", "Three."]]}}
LIBRARIES = {
    "squad.json": (SQUAD, lambda file: documents.from_squad(sources.read_json(file, documents.SquadFile))),
    "squad.jsonl": ([SQUAD_ROW], lambda file: documents.from_squad(sources.read_rows(file, documents.SquadRow))),
    "hotpot.json": ([HOTPOT], lambda file: documents.from_hotpot(sources.read_rows(file, documents.HotpotRow))),
    "hotpot.jsonl": ([HOTPOT_ROW], lambda file: documents.from_hotpot(sources.read_rows(file, documents.HotpotRow))),
}


@pytest.mark.parametrize("name", LIBRARIES)
@given(data=st.data())
def test_questions_with_documents(name, data, folder):
    content, read = LIBRARIES[name]
    lines = name.endswith("jsonl")
    raw = "".join(json.dumps(row) + "\n" for row in content) if lines else json.dumps(content)
    (file := folder / name).write_bytes(data.draw(mutated(raw, "jsonl" if lines else "json")))
    read_or_refused(lambda: read(file))
