"""The ops by glob: each file of ops/ says of one op what is right, what runs it on a CPU, and what must be refused.

CHECKS    functions of an implementation with the signature of the op's reference: AssertionError where it is wrong;
          `check(implementation, examples=n)` draws n cases for each shape, and every shape compiles
BACKENDS  name -> implementation
BROKEN    check -> implementations that are wrong in one place each

Where CHECKS is a dict, the op has variants with checks and backends of their own: variant -> ... in both. An op with a
backend "tpu" has STRICT_SHAPES for its first check; all else of an op are tests of its own, which pytest finds there.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

FILES = sorted(Path(__file__).parent.glob("ops/*.py"))
OPS = {file.stem: import_module(f"tests.kernels.ops.{file.stem}") for file in FILES}


def variants(op: str, module: ModuleType) -> list[tuple[str, list[Callable[..., None]], dict[str, Callable[..., Any]]]]:
    """(variant, checks, backends) for each; an op without variants is its own."""
    if isinstance(module.CHECKS, dict):
        return [(variant, checks, module.BACKENDS[variant]) for variant, checks in module.CHECKS.items()]
    return [(op, module.CHECKS, module.BACKENDS)]


VARIANTS = [(op, *variant) for op, module in OPS.items() for variant in variants(op, module)]
CHECKS: dict[str, list[Callable[..., None]]] = {variant: checks for _, variant, checks, _ in VARIANTS}
