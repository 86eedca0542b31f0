"""HTML pages from the templates (`*.html.jinja`) beside the code that fills them; every text in them is escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """The page that a template of this package, such as "report/report.html.jinja", makes of these values."""
    return _TEMPLATES.get_template(template).render(values)
