"""Where the data lies that tests may read but the repository does not hold."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[3] / "shared"


def shared(path: str) -> Path:
    """A file or folder of `../shared` beside the repository; CLUSTERKV_DATA may name another place of its `data`.

    Skips the calling test where it is absent.
    """
    places = [_BESIDE / path]
    if data := os.environ.get("CLUSTERKV_DATA"):
        inside = path.removeprefix("data/")
        places.insert(0, Path(data) / inside if inside != path else Path(data).parent / path)
    for place in places:
        if place.exists():
            return place
    pytest.skip(f"needs the shared data {path}, looked for {' and '.join(map(str, places))}")
