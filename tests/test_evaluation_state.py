"""Problems whose state the model writes itself, and the baseline that keeps the prompt and random rows."""

import re
from importlib import resources

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.tasks import state, suites
from clusterkv_jax.evaluation.tasks.cases import build_prompt, counter
from clusterkv_jax.presets import preset
from tests.support.tiny import STEP, prefill, prompt, tiny


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(resources.files("clusterkv_jax.models") / "demo"))


def test_every_task_shows_the_same_examples_and_asks_its_number_of_steps(tokenizer):
    asked = suites.cases("state", suites.Options(limit=2), tokenizer, 8192)
    assert [case.task for case in asked[::2]] == list(state.TASKS)
    for case in asked:
        steps, given = int(case.task.rsplit("_", 1)[1]), case.context.rstrip().rsplit("\n", 1)[1]
        assert len(re.findall(r"= " if "assign" in case.task else r"\d+", given)) == steps
        assert case.context.count("\n\n") == len(state.SHOWN)
        assert build_prompt(case, tokenizer, 8192).context  # it fits the demo's positions with its new tokens
    (sums,) = suites.cases("state", suites.Options(tasks=("running_sum_24",), limit=1), tokenizer, 8192)
    numbers = sums.context.rstrip().rsplit("\n", 1)[1].removeprefix("Numbers: ").split()
    assert sums.answers[0].endswith(f" + {numbers[-1]} = {sum(map(int, numbers))}")


@pytest.mark.parametrize("kind", state.KINDS)
def test_the_last_step_is_the_answer_and_all_fit_the_new_tokens(kind, tokenizer):
    make, count = state.KINDS[kind][0], counter(tokenizer)
    for steps in state.STEPS:
        (case,) = state.cases(f"{kind}_{steps}", range(1), count, 0)
        given, solved = make(np.random.default_rng([0, list(state.KINDS).index(kind), steps, 0]), steps)
        assert case.context.endswith(f": {given}\n")
        assert case.answers == (solved[-1],)
        assert len(solved) == steps
        assert count("; ".join(solved)) < case.max_new_tokens


def test_a_copied_variable_has_the_value_of_its_source():
    given, solved = state.assignments(np.random.default_rng(3), 24)
    values = dict(each.split(" = ") for each in solved)
    asked = dict(each.split(" = ") for each in given.split("; "))
    assert all(values[name] == values.get(what, what) for name, what in asked.items())
    assert asked["x"].isalpha()


def test_random_rows_keep_the_prompt_while_a_model_writes():
    model, method = tiny(), preset("scripts/studies/random_rows.py:RandomRows", ckv.Budget(tokens=64))
    cache, logits = prefill(method, prompt(1, 20), max_new_tokens=180, reserve=180)
    held, seen = [], []
    for _ in range(180):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        cache, logits = STEP(model.params, model.config, method, cache, token)
        layer = cache.layers[0]
        held.append(int(np.asarray(layer.length)[0, 0]))
        seen.append(set(np.asarray(layer.positions)[0, 0, : held[-1]].tolist()))
    assert held[42:47] == [63, 64, 65, 66, 67]
    assert max(held) == 191
    assert held[171] == 64
    assert all(rows >= set(range(20)) for rows in seen)
    assert seen[-1] >= set(range(200 - 32, 200))
    written = seen[-1] - set(range(20)) - set(range(200 - 64, 200))
    assert 0 < len(written) < 46
