"""LongBench (Bai et al., 2024): 21 tasks by two protocols, from the hub or from local jsonl files.

official: the whole prompt in the official template, longer ones cut in the middle, inside the chat template except
for few-shot and code tasks; compressed whole, question included.
kvpress: the same template divided into context, question and answer prefix; 20 new tokens more; the context is
compressed before the question is seen. The papers after 2024 use it; numbers of the two cannot be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from clusterkv_jax.evaluation.tasks.cases import Case, middle_cut
from clusterkv_jax.storage import schema
from clusterkv_jax.text.tokenizer import encode

ENGLISH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
KVPRESS_NEW_TOKENS = 20  # more than the official number


class _Answered(TypedDict):
    context: str
    answers: Annotated[list[str], Meta(min_length=1)]
    all_classes: list[str] | None
    length: int


class LongBenchRecord(_Answered, total=False):
    """A row as LongBench's authors publish it, with an input, or of kvpress's data set, with the template's parts."""

    input: str
    question: str
    answer_prefix: str


@dataclass(frozen=True)
class Task:
    """A task's official template and length, its metric, and where kvpress divides the template."""

    template: str
    question: str
    answer_prefix: str
    metric: str
    max_new_tokens: int
    chat: bool = True

    def fill(self, template: str, row: Mapping[str, Any]) -> str:
        """A part of the template with the row's texts in it; braces in the texts stay what they are."""
        return template.format(context=row["context"], input=row["input"])


def _read_tasks() -> dict[str, Task]:
    file = resources.files("clusterkv_jax.configs") / "evaluation" / "longbench.yaml"
    content = schema.from_yaml(schema.read_text(file, most=schema.MOST_YAML), str(file))
    return schema.checked(content, dict[str, Task], str(file))


TASKS = _read_tasks()


def official_prompt(task: str, row: Mapping[str, Any], tokenizer: Any, most: int) -> tuple[str, int]:
    """The official prompt before any chat template, and how many tokens were cut from its middle.

    A prompt of more than `most` tokens is put together from the texts of its first and last most // 2 tokens.
    """
    text = TASKS[task].fill(TASKS[task].template, row)
    tokens = tuple(encode(tokenizer, text, add_special_tokens=True))
    if len(tokens) <= most:
        return text, 0
    ids = middle_cut(tokens, most)
    halves = ids[: most // 2], ids[most // 2 :]
    return "".join(tokenizer.decode(list(half), skip_special_tokens=True) for half in halves), len(tokens) - len(ids)


def official_case(task: str, number: int, row: Mapping[str, Any], tokenizer: Any, limit: int) -> Case:
    """A case of the official protocol; `limit` is the model's positions, of which the prompt takes 500 less."""
    spec = TASKS[task]
    _check_has(("input",), task, number, row)
    text, cut = official_prompt(task, row, tokenizer, limit - max(500, spec.max_new_tokens + 64))
    return Case(
        id=f"{task}/{number}",
        task=task,
        context=text,
        answers=_answers(task, number, row),
        metric=spec.metric,
        max_new_tokens=spec.max_new_tokens,
        classes=tuple(row["all_classes"] or ()),
        chat=spec.chat,
        facts={"words": row["length"], "cut": cut},
    )


def kvpress_case(task: str, number: int, row: Mapping[str, Any]) -> Case:
    """A case of kvpress's protocol. Rows of its hub data set come divided; official rows are divided here."""
    spec = TASKS[task]
    if "input" in row:
        context, question, prefix = parts(task, row)
    else:
        _check_has(("question", "answer_prefix"), task, number, row)
        context, question, prefix = row["context"], row["question"], row["answer_prefix"]
    return Case(
        id=f"{task}/{number}",
        task=task,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=_answers(task, number, row),
        metric=spec.metric,
        max_new_tokens=spec.max_new_tokens + KVPRESS_NEW_TOKENS,
        classes=tuple(row["all_classes"] or ()),
        truncate=True,
        facts={"words": row["length"]},
    )


def _check_has(fields: Sequence[str], task: str, number: int, row: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in row:
            raise ValueError(f"Row {number} of {task} has no field {name!r}; it has {', '.join(row)}.")


def _answers(task: str, number: int, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The right answers, of which a number is looked for where the metric counts numbers."""
    for answer in row["answers"]:
        if TASKS[task].metric == "number_share" and not any(map(str.isdecimal, answer)):
            raise ValueError(
                f"Row {number} of {task} has the answer {schema.shown(repr(answer))}, which holds no number."
            )
    return tuple(row["answers"])


def parts(task: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Context, question and answer prefix, which together are the official prompt."""
    spec = TASKS[task]
    at = spec.template.rindex(spec.question)
    question = spec.fill(spec.template[at:], row)
    # Some rows end in spaces or a line break behind it.
    end = question.rindex(spec.answer_prefix) if question.rstrip().endswith(spec.answer_prefix.rstrip()) else None
    return spec.fill(spec.template[:at], row), question[:end], "" if end is None else question[end:]
