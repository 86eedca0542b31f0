"""What all sides share: the prompts, and how they name what they run with."""

from collections.abc import Iterable
from importlib import metadata

import numpy as np


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """The same tokens for every side."""
    return np.random.default_rng(0).integers(0, vocabulary, length).tolist()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of packages that are installed; a checkout need not be."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
