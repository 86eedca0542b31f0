"""The suite executes the annotations: a wrong shape, or a wrong shape letter, fails the test that meets it."""

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import clusterkv_jax
from clusterkv_jax import sampling
from clusterkv_jax.blocks.causal_attention import causal_attention


@pytest.fixture(autouse=True)
def _executed(request):
    if request.config.getoption("--untyped"):
        pytest.skip("--untyped leaves annotations alone.")


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Imports a module of the library, through the suite's hook, with one text of its source exchanged."""

    def load(module, right, wrong):
        source = (Path(clusterkv_jax.__file__).parent / f"{module}.py").read_text()
        assert source.count(right) == 1
        (tmp_path / "changed.py").write_text(source.replace(right, wrong))
        monkeypatch.setattr(clusterkv_jax, "__path__", [*clusterkv_jax.__path__, str(tmp_path)])
        return importlib.import_module("clusterkv_jax.changed")

    yield load
    sys.modules.pop("clusterkv_jax.changed", None)


def filtered(module):
    return module.filtered(jnp.arange(15.0).reshape(3, 5), module.Sampling())


def filtered_square(module):
    return module.filtered(jnp.arange(9.0).reshape(3, 3), module.Sampling(temperature=1.0, top_k=2))


def merge_round(module):
    keys = jnp.ones((1, 2, 8, 4))
    return module.merge_round(keys, keys, jnp.ones((1, 2, 8)), merges=2, chunk=8)


def outlier_share(module):
    return module.outlier_share(jnp.ones((1, 2, 8, 4)), chunk=8)


@pytest.mark.parametrize(
    ("call", "module", "right", "wrong"),
    [
        (outlier_share, "calibration/measured", '-> Float[Array, "B K"]:', '-> Float[Array, "B N"]:'),
        (merge_round, "soft_matching", 'Float[Array, "B K N"],\n    *,', 'Float[Array, "B K D"],\n    *,'),
        (filtered, "sampling", 'def filtered(logits: Float[Array, "B V"]', 'def filtered(logits: Float[Array, "B B"]'),
    ],
)
def test_a_wrong_shape_letter_fails_a_valid_call(call, module, right, wrong, changed):
    call(importlib.import_module(f"clusterkv_jax.{module.replace('/', '.')}"))
    with pytest.raises(TypeCheckError):
        call(changed(module, right, wrong))


def test_shapes_and_dtypes_that_disagree_are_refused():
    q, k = jnp.ones((1, 8, 4, 8)), jnp.ones((1, 8, 2, 8))
    assert causal_attention(q, k, k).shape == q.shape
    with pytest.raises(TypeCheckError, match="causal_attention"):
        causal_attention(q, k[:, :7], k[:, :7])
    with pytest.raises(TypeCheckError, match="causal_attention"):
        causal_attention(q.astype(jnp.int32), k, k)


def test_rank_promotion_is_refused(changed):
    """Of as many sequences as tokens, [B] would be broadcast along the wrong dimension without a word."""
    filtered_square(sampling)
    with pytest.raises(ValueError, match="numpy_rank_promotion"):
        filtered_square(changed("sampling", "[0][:, -1:]", "[0][:, -1]"))
