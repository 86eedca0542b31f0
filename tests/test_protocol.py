"""The method protocol stays small: what a method may say, and how little it must."""

import ast
import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import methods
from clusterkv_jax.methods.base import Method
from clusterkv_jax.methods.families.eviction import Eviction
from clusterkv_jax.methods.schedule import Schedule
from tests.support.methods import PAGE, LargeValues

ROOT = Path(__file__).parents[1]
# Derived from `storage`, never overridden.
DERIVED = {"forgets"}


def subclasses(cls):
    return {cls, *(below for kind in cls.__subclasses__() for below in subclasses(kind))}


def test_the_base_has_eleven_members():
    members = {name for name in vars(Method) if not name.startswith("_")} - DERIVED
    assert members == {
        *("protected", "schedule", "storage", "budget_rows", "check"),
        *("inputs", "init_state", "compress", "recompress", "step", "degree_power"),
    }
    assert not any(DERIVED & vars(cls).keys() for cls in subclasses(Method) - {Method})


@pytest.mark.parametrize(("base", "abstract"), [(Method, {"compress"}), (Eviction, {"score"})])
def test_what_must_be_said_is_abstract(base, abstract):
    assert base.__abstractmethods__ == abstract
    with pytest.raises(TypeError, match="abstract"):
        base(*[ckv.Budget(ratio=0.5)] * (base is Eviction))


@pytest.mark.parametrize(("earlier", "now"), [("holds", "storage"), ("needs", "inputs"), ("remember", "init_state")])
def test_an_earlier_name_of_a_member_is_refused(earlier, now):
    with pytest.raises(TypeError, match=f"Mine.{earlier} is called {now} now."):
        type("Mine", (Method,), {earlier: None})


def test_the_method_of_the_page_has_at_most_twelve_lines():
    source = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    definition = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    first = min(decorator.lineno for decorator in definition.decorator_list)
    lines = [line for line in source.splitlines()[first - 1 : definition.end_lineno] if line.strip()]
    assert len(lines) <= 12
    assert {name for name in vars(LargeValues) if not name.startswith("_")} == {"protected", "schedule", "score"}


def test_nobody_asks_what_a_method_is_but_by_its_values():
    """A base class is no question: whatever differs between methods is a member of the protocol."""
    kinds = {cls.__name__ for cls in subclasses(Method)} | {"Method"}
    for folder in ("clusterkv_jax", "models", "kernels", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                    named = {leaf.id for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Name)}
                    named |= {leaf.attr for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Attribute)}
                    assert not named & kinds, f"{file}:{node.lineno}"


def test_the_pieces_of_a_method_are_where_the_page_says():
    for name in (
        "Eviction",
        "Windowed",
        "Clustering",
        "Recall",
        "Protected",
        "Schedule",
        "every",
        "Rows",
        "Compressed",
    ):
        assert inspect.getdoc(getattr(methods, name))


@pytest.mark.parametrize("kind", ["token", "ring"])
def test_eviction_refuses_a_schedule_that_needs_a_step_of_its_own(kind):
    with pytest.raises(ValueError, match=r"LargeValues schedule must be recompress_every\(n\) or Schedule\(\), got"):
        LargeValues(ckv.Budget(tokens=20), schedule=Schedule(kind))


@pytest.mark.wrong_arguments
def test_a_score_of_another_shape_is_named():
    class Short(LargeValues):
        def score(self, rows):
            return super().score(rows)[..., 1:]

    keys, values = np.ones((2, 1, 2, 100, 16), np.float32)
    with pytest.raises(ValueError, match=r"Short.score must return \[B,K,C\] = \(1, 2, 100\), got \(1, 2, 99\)."):
        ckv.compress(Short(ckv.Budget(tokens=20)), None, jnp.asarray(keys), jnp.asarray(values))
