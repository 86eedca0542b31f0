"""An evaluation's texts are written by engines: as `generate` says them, a line for each as soon as it is there."""

import json

import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.engine import prefill
from clusterkv_jax.evaluation import batching, runner
from clusterkv_jax.evaluation.responses import responder
from clusterkv_jax.evaluation.settings import settings
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from tests.engine.test_engine import METHOD, written
from tests.support.tiny import prompt

ENTRIES = [batching.MethodEntry("full", "1.0", ckv.Full()), batching.MethodEntry("centroidkv", "0.5", METHOD)]
CONTEXTS = (40, 40, 40, 90, 50, 50)  # of equal length: the same; of two powers of two
CASES = [Case(f"t/{i}", "t", answers=("x",), max_new_tokens=4 + i % 2) for i in range(len(CONTEXTS))]
PROMPTS = [EncodedPrompt(tuple(prompt(length, length)), (i + 1,)) for i, length in enumerate(CONTEXTS)]
JOBS = [batching.Job(i, case, text) for i, (case, text) in enumerate(zip(CASES, PROMPTS, strict=True))]
BATCHES = batching.plan(JOBS, ENTRIES, 2)


def said(part: batching.EvaluationBatch) -> ckv.Result:
    (job,) = part.jobs
    context, question = [list(job.prompt.context)], [list(job.prompt.question)]
    options = {"method": part.method, "max_new_tokens": job.case.max_new_tokens}
    return ckv.generate(written(), context, questions=question, **options)


def test_texts_are_those_of_generate_and_come_one_by_one(monkeypatch):
    read, lengths, seen = prefill.prefill_batch, [], []
    monkeypatch.setattr(prefill, "prefill_batch", lambda *args: lengths.append(len(args[3].texts[0])) or read(*args))
    for part, (answer,) in responder(written(), BATCHES, 2, seen.append)(BATCHES):
        one = said(part)
        assert answer.text == one.texts[0]
        assert answer.rows == np.mean(one.stats.kept_rows)
        assert answer.seconds >= 0
    assert len(lengths) == 10  # two of the twelve share a context and the number of new tokens with the one before
    assert {stats.slots for stats in seen} == {1, 2}


def test_a_run_that_was_killed_asks_no_finished_example_again(tmp_path):
    asked = []

    def go(folder, most):
        def answers(missing):
            for count, answer in enumerate(responder(written(), BATCHES, 2)(missing)):
                if count == most:
                    raise KeyboardInterrupt
                asked.append(answer[0].keys)
                yield answer

        config = settings({"suite": "s", "model": "m"}, JOBS, ENTRIES)
        runner.record(folder, config, {}, BATCHES, answers)
        return [json.loads(line) | {"seconds": 0} for line in (folder / runner.RESULTS).read_text().splitlines()]

    unbroken = go(tmp_path / "unbroken", None)
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", 5)
    assert len((tmp_path / "cut" / runner.RESULTS).read_text().splitlines()) == 5
    assert go(tmp_path / "cut", None) == unbroken
    assert len(asked) == len({key for (key,) in asked}) == len(unbroken) == 12
