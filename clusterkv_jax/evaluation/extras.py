"""Libraries that the base installation leaves out."""

import importlib
import warnings
from types import ModuleType


def library(name: str, why: str) -> ModuleType:
    """A module of the extra `eval`, imported when it is needed; a ValueError in one sentence where it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old code inside them
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0]:
            raise
        raise ValueError(f"{why} needs the package {name!r}: pip install 'clusterkv-jax[eval]'.") from error
