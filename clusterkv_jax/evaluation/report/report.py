"""report.html: the table and every picture in one file that needs nothing from anywhere."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterkv_jax.evaluation.report import plots
from clusterkv_jax.evaluation.report.table import Summary, budget_name, cell_text, notes
from clusterkv_jax.evaluation.templates import render


def report(summary: Summary, lines: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The page: title, table (published rows in italics), pictures, and how it was made."""
    config = run["config"]
    return render(
        "report/report.html.jinja",
        title=f"{config['suite']} · {config['model']}",
        notes=notes(summary),
        summary=summary,
        budget_name=budget_name,
        cell_text=cell_text,
        sections=list(_sections(summary, lines)),
        run=json.dumps(run, indent=2, ensure_ascii=False),
    )


def _sections(
    summary: Summary, lines: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Sequence[tuple[str | None, str]]]]:
    """Every picture that the results allow, with its name if it has one, under headings."""
    if curve := plots.score_over_budget(summary):
        yield "By budget", [(None, curve)]
    if summary.perplexity:
        yield "By position", [(None, plots.perplexity_by_position(summary))]
        return
    measured = [row for row in summary.rows if row.source == "measured"]
    budgets = dict.fromkeys(row.budget for row in measured if row.method != "full") or {measured[0].budget: None}
    yield "By task", [(f"{budget_name(budget)} kept", plots.bars_by_task(summary, budget)) for budget in budgets]
    maps = [picture for row in measured if (picture := plots.needle_map(lines, row.method, row.budget))]
    if maps:
        yield "Needles by depth and length", [(None, picture) for picture in maps]
