"""The folder that `clusterkv evaluate` writes to where none is named."""

import re
from pathlib import Path
from typing import Any


def results_folder(suite: str, model: str, **options: Any) -> str:
    """results/SUITE-MODEL, with what is not as it is by default: results/ruler-demo-limit-5-query-aware.

    Methods, budgets, tasks and lengths are no part of it: they are added to the same folder.
    """
    parts = [suite, Path(model).name]
    for name, value in options.items():
        if value not in (None, False, 0):
            parts += [name] if value is True else [name, Path(str(value)).name]
    return f"results/{re.sub(r'[^A-Za-z0-9._-]+', '-', '-'.join(parts)).strip('-.')}"
