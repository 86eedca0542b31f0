"""Programs in processes of their own."""

import subprocess
import sys
from typing import Any


def python(*arguments: Any, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Python with these arguments; the test fails with its errors if it does."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, **options)
    assert process.returncode == 0, process.stderr[-3000:]
    return process
