"""One of each method, in a size for small prompts, and the one that the documentation builds."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import clusterkv_jax as ckv

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "adding-a-method.md"
SHAPE = {"sinks": 2, "recent": 4, "chunk": 16}


def documented() -> dict[str, Any]:
    """What the first example of the page on adding a method defines."""
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


LargeValues = documented()["LargeValues"]


class LargeValuesInPages(LargeValues):
    """The page's method with one more line."""

    storage = "pages"


def page_method(budget: ckv.Budget, interval: int = 4, kind: type = LargeValues) -> Any:
    """The page's method, of a size for small prompts."""
    method = kind(budget)
    return dataclasses.replace(
        method,
        protected=dataclasses.replace(method.protected, recent=4),
        schedule=dataclasses.replace(method.schedule, interval=interval),
    )


def every_method(budget: ckv.Budget, interval: int = 4) -> list[Any]:
    """Methods that the papers leave alone while decoding compress again."""
    return [
        dataclasses.replace(ckv.CentroidKV(budget, **SHAPE), interval=interval),
        dataclasses.replace(ckv.GravityKV(budget, **SHAPE), interval=interval),
        ckv.SnapKV(budget, window=4, kernel=3, decode_interval=interval),
        ckv.PyramidKV(budget, window=4, kernel=3, beta=3, decode_interval=interval),
        ckv.AdaKV(budget, window=4, kernel=3, decode_interval=interval),
        ckv.ChunkKV(budget, window=4, chunk=5, reuse_layers=2, decode_interval=interval),
        ckv.ExpectedAttention(budget, sinks=2, future=8, decode_interval=interval),
        ckv.ExpectedAttention(budget, sinks=2, future=8, scope="layer", decode_interval=interval),
        ckv.KeyDiff(budget, decode_interval=interval),
        ckv.Knorm(budget, decode_interval=interval),
        ckv.TOVA(budget, decode_interval=interval),
        ckv.LagKV(budget, sinks=2, lag=8, decode_interval=interval),
        ckv.DropKV(budget, window=4, kernel=3, decode_interval=interval),
        ckv.KVzap(budget, sinks=2, recent=4, decode_interval=interval),
        ckv.OrbitKV(budget, sinks=2, recent=4, interval=interval),
        ckv.StreamingLLM(budget),
        ckv.H2O(budget),
        ckv.CaM(budget, merge_budget=8),
        ckv.Composed(ckv.SnapKV(budget, window=4), ckv.H2O(budget, recent=4)),
        ckv.Composed(ckv.Compactor(budget, sinks=2, recent=2, chunk=16), ckv.H2O(budget, recent=4)),
        page_method(budget, interval),
        page_method(budget, interval, LargeValuesInPages),
    ]


def fitted_method(budget: ckv.Budget, interval: int = 4) -> Any:
    """Fitted rows; another width of padding adds up in another order, which a fit makes larger than rounding."""
    return ckv.Matched(ckv.SnapKV(budget, window=4, kernel=3, decode_interval=interval))


def named(method: Any) -> str:
    """Name of a method in the report of the tests."""
    return type(method).__name__
