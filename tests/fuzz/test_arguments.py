"""Any argument of any public function: a result, or one sentence that names what is wrong."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clusterkv_jax as ckv
from tests.fuzz.rules import one_sentence
from tests.support.tiny import VOCAB, prompt, tiny

pytestmark = pytest.mark.wrong_arguments

NUMBERS = [0, 1, -1, -5, 7, 2**30, 2**31, -(2**63), 2**63, 10**30, 0.5, -0.0, 1e-40, 1e300, float("nan"), float("inf")]
ODD = [
    None,
    True,
    False,
    "",
    "3",
    "x" * 5000,
    b"x",
    (),
    [],
    [1],
    {},
    {"a": 1},
    object(),
    len,
    np.float32(2),
    np.int64(3),
]
ODD += [np.nan * np.ones(3), np.zeros((0, 3)), jnp.zeros(3), ckv.Full(), ckv.Budget(tokens=3), 1j]


def odd(value: Any) -> st.SearchStrategy[Any]:
    """Something else in place of a value: near it, or of any kind."""
    near = st.builds(_bent, st.just(value), st.sampled_from(range(17)), st.integers(0, 2**31))
    return near if hasattr(value, "shape") and np.ndim(value) else st.sampled_from([*NUMBERS, *ODD])


def _bent(x: Any, how: int, seed: int) -> Any:
    """An array with other dimensions, other types, or one other number."""
    x, rng = np.asarray(x), np.random.default_rng(seed)
    axis = int(rng.integers(x.ndim))
    if how < 4:
        at = tuple(rng.integers(size) for size in x.shape)
        copy = x.astype(np.result_type(x.dtype, np.float32) if how else x.dtype)
        copy[at] = (-1, np.nan, np.inf, 1e25)[how]
        return copy
    types = (np.float64, np.int32, np.int8, np.uint32, np.bool_, np.float16, np.complex64, object, "U4")
    if how < 13:
        return x.astype(types[how - 4])
    return (x[..., None], x.take(0, axis), x.take(range(x.shape[axis] - 1), axis), x.tolist())[how - 13]


def some_changed(call: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The call with one or two arguments changed."""
    names = st.lists(st.sampled_from(sorted(call)), min_size=1, max_size=2, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: odd(call[name]) for name in chosen})).map(
        lambda changed: call | changed
    )


def tensors(heads: int, tokens: int = 40) -> jax.Array:
    return jnp.asarray(np.random.default_rng(heads).normal(size=(2, heads, tokens, 8)), jnp.float32)


Q, KEYS, VALUES = tensors(4), tensors(2), tensors(2)
LENGTHS = np.asarray([40, 30], np.int32)
ROWS = ckv.Budget(tokens=20)
QUEST = ckv.Quest(ROWS, page=4)
COMPRESS = {"method": ckv.SnapKV(ROWS, window=8), "queries": Q, "keys": KEYS, "values": VALUES, "lengths": LENGTHS}
COMPRESS |= {"layer": 0, "num_layers": 1, "max_new_tokens": 0, "key": jax.random.key(0), "hidden": None}
BUILD = {"method": QUEST, "keys": KEYS, "values": VALUES, "queries": Q, "initial_rows": None, "skew": None}
IDS = np.asarray([prompt(1, 24), prompt(2, 24)], np.int32)
PREFILL = {"method": ckv.Full(), "tokens": IDS, "lengths": np.asarray([24, 20], np.int32), "max_new_tokens": 4}
PREFILL |= {"reserve": 8, "step_tokens": 1, "prefill_chunk": None, "key": jax.random.key(0)}
GENERATE = {"prompts": IDS.tolist(), "method": ckv.Full(), "ratio": None, "tokens": None, "budget": None}
GENERATE |= {"keep_short": False, "question": None, "questions": [[1, 2], [3]], "max_new_tokens": 3}
GENERATE |= {"sampling": ckv.Sampling(), "seed": 0, "stop": (), "prefill_chunk": None}
GENERATE |= {"stop_ids": (5,), "chat": False, "system": None, "chat_template_kwargs": None, "special_tokens": True}
GENERATE |= {"reading": "whole", "window": 16, "chunk": 8, "renumber": False}


def refused(call: Any) -> tuple[Any, str | None]:
    """A first compilation takes seconds on a busy machine."""
    return one_sentence(call, allowed=(ValueError, TypeError), seconds=60)


@given(arguments=some_changed(COMPRESS))
def test_compress(arguments):
    layer, _ = refused(lambda: ckv.compress(**arguments))
    if layer is not None:
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(layer))


@pytest.fixture(scope="module")
def index():
    return ckv.build_index(QUEST, KEYS, VALUES)


@given(arguments=some_changed(BUILD))
def test_build_index(arguments):
    refused(lambda: ckv.build_index(**arguments))


@given(data=st.data())
def test_select(index, data):
    call = {"method": QUEST, "query": Q[:, :, 0], "index": index}
    arguments = data.draw(some_changed(call) | some_changed(index).map(lambda changed: call | {"index": changed}))
    rows, _ = refused(lambda: ckv.select(**arguments))
    assert rows is None or rows.shape[:2] == (2, 4)


@given(query=odd(Q[:, :, 0]))
def test_attend(query):
    layer = ckv.compress(ckv.Full(), None, KEYS, VALUES)
    refused(lambda: ckv.attend(layer, query))


@given(arguments=some_changed(PREFILL))
def test_prefill(arguments):
    _, said = refused(lambda: ckv.prefill(tiny().params, tiny().config, **arguments))
    assert said is not None or np.max(arguments["tokens"]) < VOCAB


@pytest.fixture(scope="module")
def cache():
    return ckv.prefill(tiny().params, tiny().config, **PREFILL)[0]


@given(token=odd(np.asarray([1, 2], np.int32)) | st.sampled_from(ODD))
def test_decode_step(cache, token):
    numbers = isinstance(token, np.ndarray) and token.dtype.kind in "iu"
    step = jax.jit(ckv.decode_step, static_argnums=(1, 2)) if numbers else ckv.decode_step
    refused(lambda: step(tiny().params, tiny().config, ckv.Full(), cache, token))


@given(data=st.data())
def test_generate(data):
    ids = st.lists(st.lists(st.integers(-2, VOCAB) | st.sampled_from(NUMBERS + ODD), max_size=3), max_size=3)
    arguments = data.draw(some_changed(GENERATE) | ids.map(lambda rows: GENERATE | {"prompts": rows}))
    result, _ = refused(lambda: ckv.generate(tiny(), **arguments))
    assert result is None or all(0 < len(tokens) <= arguments["max_new_tokens"] for tokens in result.tokens)


# --- settings, which compile nothing ---

CLASSES = [getattr(ckv, name) for name in ckv.__all__ if isinstance(getattr(ckv, name), type)]
SETTINGS = [cls for cls in CLASSES if dataclasses.is_dataclass(cls) and issubclass(cls, ckv.Full.__mro__[1])]
BUDGETS = st.builds(
    dict, **{name: st.sampled_from([None, 0.5, *NUMBERS, *ODD]) for name in ("ratio", "tokens", "bytes")}
)


@pytest.mark.parametrize("cls", [*SETTINGS, ckv.Sampling], ids=lambda cls: cls.__name__)
@settings(max_examples=max(100, settings.default.max_examples))
@given(data=st.data())
def test_settings(cls, data):
    fields = [field for field in dataclasses.fields(cls) if field.init]
    names = (
        st.lists(st.sampled_from([field.name for field in fields]), min_size=1, max_size=2) if fields else st.just([])
    )
    given_values = {name: data.draw(st.sampled_from([*NUMBERS, *ODD])) for name in data.draw(names)}
    needed = {"budget": ROWS} if "budget" in [field.name for field in fields] else {}
    if cls is ckv.Composed:
        needed = {"prefill": ckv.SnapKV(ROWS, window=8), "decode": ckv.H2O(ROWS)}
    if cls is ckv.Matched:
        needed = {"method": ckv.SnapKV(ROWS, window=8)}
    made, _ = refused(lambda: cls(**needed | given_values))
    assert made is None or isinstance(hash(made), int)


@settings(max_examples=max(100, settings.default.max_examples))
@given(arguments=BUDGETS)
def test_budget(arguments):
    made, _ = refused(lambda: ckv.Budget(**arguments))
    assert made is None or isinstance(hash(made), int)


def test_every_method_is_tried():
    assert len(SETTINGS) > 15
    assert typing.get_type_hints(ckv.generate).keys() - {"model", "on_text", "progress", "return"} == set(GENERATE)
