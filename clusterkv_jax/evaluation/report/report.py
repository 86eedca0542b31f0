"""report.html: a table that sorts itself, charts and examples in one file that needs nothing from anywhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from clusterkv_jax.evaluation.report.examples import examples
from clusterkv_jax.evaluation.report.pictures import needles, pictures
from clusterkv_jax.evaluation.report.table import Summary, budget_name, cell_text, notes
from clusterkv_jax.evaluation.templates import render

# A browser needs seconds for more; table.md and results.jsonl have all.
_MOST_CELLS = 60_000


def report(summary: Summary, lines: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The page: charts, table (published rows in italics), examples, and how it was made."""
    config = run["config"]
    most = max(1, _MOST_CELLS // (len(summary.columns) + 6))
    return render(
        "report/report.html.jinja",
        title=f"{config['suite']} · {config['model']}",
        notes=notes(summary),
        summary=summary,
        rows=summary.rows[:most],
        left_out=len(summary.rows) - most,
        budget_name=budget_name,
        cell_text=cell_text,
        pictures=list(pictures(summary)),
        needles=needles(lines),
        examples=list(examples(lines)),
        sessions=run["sessions"],
        made_with=_made_with,
    )


def _made_with(session: Mapping[str, Any]) -> str:
    """When, where and with which versions a session ran."""
    versions = session.get("versions")
    named = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, Mapping) else []
    parts = [session.get("started"), session.get("device"), session.get("commit"), ", ".join(named)]
    return " · ".join(str(part) for part in parts if part)
