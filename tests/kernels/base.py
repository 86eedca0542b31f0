"""What the checks of all ops share: hypothesis draws the cases, float64 numpy says what is right.

Shapes are few, because every one compiles; what is drawn are contents: lengths around the edges of chunks and blocks,
empty slots, ties. What must not matter is NaN. Cases are made in numpy: every step in jnp would compile too.
"""

import inspect
from importlib.metadata import version
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from clusterkv_jax.kernels.quantised import Quantised, dequantised, quantise

# Relative norms, the worst head's.
F32, BF16 = 1e-5, 5e-3


def stored(x, dtype):
    """Rows as a numpy array of this type, or in the codes of this name."""
    return jax.tree.map(np.asarray, quantise(jnp.asarray(x), dtype)) if isinstance(dtype, str) else np.asarray(x, dtype)


def exact(rows):
    """What stored rows stand for, float64."""
    rows = dequantised(jax.tree.map(jnp.asarray, rows)) if isinstance(rows, Quantised) else rows
    return np.asarray(rows, np.float64)


def tolerance(dtype):
    return F32 if dtype == jnp.float32 else BF16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def near(result, expected, bound, axes):
    """The relative norm of the difference over `axes` is within `bound`; where infinite, both are."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite], expected[~finite])
    error = np.linalg.norm(np.where(finite, result - np.where(finite, expected, 0), 0), axis=axes)
    size = np.linalg.norm(np.where(finite, expected, 0), axis=axes)
    assert np.all(error <= bound * size), f"relative error {np.max(error / np.maximum(size, 1e-30))}, allowed {bound}"


def compiled(function):
    """`jax.jit` in half of the time: on a CPU, XLA's older emitter of fusions compiles faster and runs slower.

    Later compilers have none. Not for what is differentiated or called in another: options belong to the outermost jit.
    """
    has_older = jax.default_backend() == "cpu" and version("jaxlib").startswith("0.10.")
    options = {"xla_cpu_use_fusion_emitters": False} if has_older else None
    return jax.jit(function, compiler_options=options)


def drawn(check, examples, *strategies):
    """Run `check` over drawn cases. No shrinking: a failing case is small already and each step would be slow."""
    quiet = settings(
        max_examples=examples,
        deadline=None,  # a first example compiles
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    quiet(given(*strategies)(check))()


def changed(op, name, **changes):
    """The op under a name, given other arguments than it is called with: each a value, or a function of those."""
    signature = inspect.signature(op)

    def wrong(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        bound.arguments |= {key: new(given) if callable(new) else new for key, new in changes.items()}
        return op(*bound.args, **bound.kwargs)

    wrong.__name__ = name
    return wrong


def edges(*sizes):
    """Lengths where loops go wrong: none, one, and one less and more than each size; the largest is drawn first."""
    return st.sampled_from(sorted({0, 1, *(n + d for n in sizes for d in (-1, 0, 1))}, reverse=True))


def lengths(batch, heads, largest, *sizes):
    one = edges(*sizes).map(lambda n: min(n, largest))
    return st.lists(one, min_size=batch * heads, max_size=batch * heads).map(
        lambda n: np.asarray(n, np.int32).reshape(batch, heads)
    )


def poisoned(x, empty):
    """NaN where `empty` says so: an entry, or a row if x has one more axis; of a quantised row, its scale."""
    if isinstance(x, Quantised):
        return Quantised(x.codes, poisoned(x.scales, empty))
    return np.where(empty[..., None] if x.ndim > empty.ndim else empty, np.asarray(np.nan, x.dtype), x)
