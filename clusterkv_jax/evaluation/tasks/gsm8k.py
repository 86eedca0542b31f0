"""GSM8K (Cobbe et al., 2021) with eight worked examples (Wei et al., 2022), which all questions share as context."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TypedDict

from clusterkv_jax.evaluation.extras import library
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.sources import read_rows, rows
from clusterkv_jax.storage import schema

MAX_NEW_TOKENS = 256


class Shot(TypedDict):
    """A worked example."""

    question: str
    target: str


class Problem(TypedDict):
    """A question with its solution, which ends in #### and a number."""

    question: str
    answer: str


class _FewShot(TypedDict):
    samples: list[Shot]


class _HarnessTask(TypedDict):
    fewshot_config: _FewShot


def shots(data: str | None) -> list[Shot]:
    """The eight examples as question and target: `cot_8shot.json` of a local folder, or lm-eval's of gsm8k_cot."""
    if data is not None and (file := Path(data) / "cot_8shot.json").exists():
        return read_rows(file, Shot)
    library("lm_eval", "The eight examples of GSM8K")
    file = resources.files("lm_eval") / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
    content = schema.from_yaml(schema.read_text(file, most=schema.MOST_YAML), str(file))
    return schema.checked(content, _HarnessTask, str(file))["fewshot_config"]["samples"]


def questions(data: str | None) -> list[Problem]:
    """The 1,319 test questions."""
    return rows(data, "test", ("openai/gsm8k", "main", "test"), Problem)


def cases(examples: Sequence[Shot], problems: Sequence[Problem]) -> list[Case]:
    """Worked examples as context, a question each; the answer is what follows #### in the solution."""
    context = "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in examples)
    return [
        Case(
            id=f"gsm8k/{number}",
            task="gsm8k",
            context=context,
            question=f"Q: {row['question']}\n",
            answer_prefix="A:",
            answers=(row["answer"].split("####")[-1].strip(),),
            metric="final_number",
            max_new_tokens=MAX_NEW_TOKENS,
            stop=("Q:",),
        )
        for number, row in enumerate(problems)
    ]
