"""report.html: the table and every picture in one file that needs nothing from anywhere."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkv_jax.evaluation.report import plots
from clusterkv_jax.evaluation.report.table import Summary, budget_name, cell_text, notes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; white-space: nowrap }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
tr.published td { color: #666; font-style: italic }
td.average { font-weight: 600 }
small { color: #666 }
figure { margin: 1rem 0; display: inline-block; max-width: 100% }
svg { max-width: 100%; height: auto }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12px }
"""


# With an icon of its own, or a browser asks a server for one.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>TITLE</title>
<style>STYLE</style>
</head>
<body>
BODY
</body>
</html>
"""


def report(summary: Summary, lines: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The page: title, table (published rows in italics), pictures, and how it was made."""
    config = run["config"]
    title = f"{config['suite']} · {config['model']}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(' '.join(notes(summary)))}</p>",
        f'<div class="wide">{_table(summary)}</div>',
        *_pictures(summary, lines),
        "<h2>How it was made</h2>",
        f"<pre>{html.escape(json.dumps(run, indent=2, ensure_ascii=False))}</pre>",
    ]
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """An HTML page of parts that are HTML."""
    return _PAGE.replace("TITLE", html.escape(title)).replace("STYLE", _STYLE).replace("BODY", "\n".join(parts))


def _table(summary: Summary) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("method", "kept", *summary.columns, "average"))
    rows = []
    for row in summary.rows:
        measured = row.source == "measured"
        name = row.method if measured else f"{row.method} ({row.source})"
        cells = "".join(f"<td>{cell_text(row.cells.get(name), summary.perplexity)}</td>" for name in summary.columns)
        average = f'<td class="average">{cell_text(row.average, summary.perplexity)}</td>'
        style = "" if measured else ' class="published"'
        rows.append(f"<tr{style}><td>{html.escape(name)}</td><td>{budget_name(row.budget)}</td>{cells}{average}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _pictures(summary: Summary, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every picture that the results allow, under headings."""
    parts = []
    if curve := plots.score_over_budget(summary):
        parts += ["<h2>By budget</h2>", f"<figure>{curve}</figure>"]
    if summary.perplexity:
        return [*parts, "<h2>By position</h2>", f"<figure>{plots.perplexity_by_position(summary)}</figure>"]
    measured = [row for row in summary.rows if row.source == "measured"]
    parts.append("<h2>By task</h2>")
    budgets = dict.fromkeys(row.budget for row in measured if row.method != "full") or {measured[0].budget: None}
    for budget in budgets:
        parts.append(f"<h3>{budget_name(budget)} kept</h3><figure>{plots.bars_by_task(summary, budget)}</figure>")
    maps = [found for row in measured if (found := plots.needle_map(lines, row.method, row.budget))]
    if maps:
        parts += ["<h2>Needles by depth and length</h2>", *(f"<figure>{picture}</figure>" for picture in maps)]
    return parts
