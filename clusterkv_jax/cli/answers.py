"""Answers and what they cost, as tables for people and JSON for programs."""

import dataclasses
import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class MethodRun:
    """One method's answers, one per file and question, and what they cost: all together, or each in an engine."""

    name: str
    method: Any
    texts: list[str]
    ends: Sequence[str]
    stats: list[Any]
    engine: Any = None


def answers(files: list[str], questions: list[str], runs: list[MethodRun]) -> Table:
    """Answers side by side: a row per file and question, a column per method."""
    table = Table(box=SIMPLE_HEAD, show_lines=len(runs[0].texts) > 1, title_justify="left", title_style="")
    if len(questions) == 1:
        table.title = Text(questions[0].strip())
    if files:
        table.add_column("text", overflow="fold")
    if len(questions) > 1:
        table.add_column("question", overflow="fold")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    for row in range(len(runs[0].texts)):
        file, question = divmod(row, max(len(questions), 1))
        cells = ([files[file]] if files else []) + ([questions[question]] if len(questions) > 1 else [])
        table.add_row(*(Text(cell.strip()) for cell in [*cells, *(run.texts[row] for run in runs)]))
    return table


def costs(runs: list[MethodRun]) -> Table:
    """What each method kept and how fast it was; megabytes are allocated, with room for question and answer."""
    table = Table(box=SIMPLE_HEAD)
    recalling = any(stats.recalled_rows for run in runs for stats in run.stats)
    recalled = ("recalled",) if recalling else ()
    for column in ("method", "KV pairs", "kept", *recalled, "cache MB", "TTFT s", "tokens/s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for run in runs:
        recalled = [stats.recalled_rows for stats in run.stats if stats.recalled_rows]
        cache_bytes = run.engine.memory.slots if run.engine else sum(stats.cache_bytes for stats in run.stats)
        table.add_row(
            run.name,
            f"{_span(list(map(_kept, run.stats)))} of {_span([stats.prompt_tokens for stats in run.stats])}",
            f"{sum(map(_kept, run.stats)) / sum(stats.prompt_tokens[0] for stats in run.stats):.1%}",
            *([_span(recalled) if recalled else "-"] if recalling else []),
            f"{cache_bytes / 1e6:.2f}",
            f"{max(stats.ttft_s for stats in run.stats):.2f}",
            f"{run.engine.tokens_per_s:.1f}" if run.engine else _speed(run.stats[0]),
        )
    return table


def _kept(stats: Any) -> int:
    """KV pairs that a head keeps of the prompt, on average over all heads."""
    return round(mean(_numbers(stats.kept_rows)))


def _speed(stats: Any) -> str:
    """Tokens per second of all rows together, the first token of each apart: its time is TTFT."""
    steps = max(stats.new_tokens) - 1
    return f"{(sum(stats.new_tokens) - len(stats.new_tokens)) / (steps * stats.tpot_s):.1f}" if steps else "-"


def in_json(model: str, files: list[str], questions: list[str], runs: list[MethodRun]) -> str:
    """The same as the tables, for programs; of an engine `stats` are a list, and `engine` says how all went."""

    def one(run: MethodRun) -> dict[str, Any]:
        said = {"name": run.name, "method": repr(run.method), "texts": run.texts, "finish_reasons": run.ends}
        stats = [dataclasses.asdict(stats) for stats in run.stats]
        return said | (
            {"stats": stats, "engine": dataclasses.asdict(run.engine)} if run.engine else {"stats": stats[0]}
        )

    named = {"files": files} if files else {}
    content = {"model": model, **named, "questions": questions, "runs": [one(run) for run in runs]}
    return json.dumps(content, indent=2, ensure_ascii=False)


def _numbers(nested: Any) -> list[int]:
    """All numbers of nested sequences."""
    return [nested] if isinstance(nested, int) else [number for item in nested for number in _numbers(item)]


def _span(nested: Any) -> str:
    """Smallest to largest number, one number where they agree."""
    low, high = min(_numbers(nested)), max(_numbers(nested))
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
