"""The programs under scripts/, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(path: str) -> ModuleType:
    """The module of `path` under scripts/; what stands beside it can be imported, as when it is run."""
    file = SCRIPTS / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
