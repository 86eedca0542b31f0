"""Libraries that the base installation leaves out, and the versions of those that are there."""

import importlib
import warnings
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType


def library(name: str, why: str, extra: str) -> ModuleType:
    """A module of an extra, imported when it is needed; a ValueError in one sentence where it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old code inside them
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{why} needs the package {error.name!r}: pip install 'clusterkv-jax[{extra}]'.") from error


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of packages that are installed; a checkout need not be."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
