"""GSM8K (Cobbe et al., 2021) with eight worked examples (Wei et al., 2022), which all questions share as context."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from clusterkv_jax.evaluation.extras import library
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.sources import read_rows, rows

MAX_NEW_TOKENS = 256


def shots(data: str | None) -> list[Mapping[str, str]]:
    """The eight examples as question and target: `cot_8shot.json` of a local folder, or lm-eval's of gsm8k_cot."""
    if data is not None and (file := Path(data) / "cot_8shot.json").exists():
        return list(read_rows(file))
    library("lm_eval", "The eight examples of GSM8K")
    text = (resources.files("lm_eval") / "tasks" / "gsm8k" / "gsm8k-cot.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["fewshot_config"]["samples"]


def questions(data: str | None) -> list[dict[str, Any]]:
    """The 1,319 test questions."""
    return rows(data, "test", ("openai/gsm8k", "main", "test"))


def cases(examples: Sequence[Mapping[str, str]], problems: Sequence[Mapping[str, Any]]) -> list[Case]:
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
