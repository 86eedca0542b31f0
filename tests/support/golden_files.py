"""Inputs and outputs of reference implementations, in tests/golden (copies of files this project owns)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden"


def golden(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and parameters of one golden file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files if key != "meta"}, json.loads(str(file["meta"]))


def names(*patterns: str) -> list[str]:
    """Names of the golden files that match."""
    return sorted(path.stem for pattern in patterns for path in FOLDER.glob(f"{pattern}.npz"))
