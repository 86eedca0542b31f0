"""Attention Matching (2602.16284): few rows whose attention mass and output are fitted to those of many.

One KV head at a time: `queries` are reference queries of all its query heads, post-RoPE and stacked; vmap for more.
A row with bias b counts as e^b rows, which is what a cache's `degree` says.

    s = q k / sqrt(D)     P = exp(s - greatest s of the query)     y = row sums of P     A = P / y
    rows      rms: the greatest root mean square of A over the queries; omp: orthogonal matching pursuit of y in P
    bias      log w, w the least squares solution of P_rows w = y between bounds
    values    the least squares solution of softmax(s_rows + bias) C = A V, minimum norm where queries are few
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.runtime.checks import check_counts, concrete
from clusterkv_jax.runtime.settings import own_settings

HIGHEST = jax.lax.Precision.HIGHEST
# Mass that exists at once, in elements (f32): 256 MiB.
MASS_AT_ONCE = 2**26
# Bounds of log w and projected steps, by how rows are selected (the authors' settings).
BOUNDS = {"rms": (-3.0, 3.0), "omp": (float(np.log(1e-12)), 7.0)}
STEPS = {"rms": 2, "omp": 0}
# Rows that count less are thrown out, at most so many times.
LEAST_LOG_WEIGHT = -7.0
CHECKS = 3
# A column that is shorter than this, once the others are taken out of it, depends on them.
DEPENDENT = 1e-6


@own_settings()
def match(
    queries: Float[Array, "n D"],
    keys: Float[Array, "N D"],
    values: Float[Array, "N D"],
    rows: Int[Array, " t"] | None,
    t: int,
    *,
    select: Literal["rms", "omp"] = "rms",
) -> tuple[Int[Array, " t"], Float[Array, " t"], Float[Array, "t D"]]:
    """t rows, their biases and their values, so that softmax(q k / sqrt(D) + bias) C is what the whole head answers.

    Jit-able with `t` and `select` static. "rms" takes O(n t + N) memory, "omp" O(n N). Fits are those of the paper's
    appendix, in float32 by singular values, the spectral norm converged.

    Args:
        queries: reference queries, post-RoPE, of all query heads of the KV head.
        keys: post-RoPE.
        values: values.
        rows: the rows to fit, as another method chose them; None selects them.
        t: how many rows.
        select: "rms" takes the rows that get most attention, "omp" those that make up the mass best. Given rows are
            fitted between the bounds that belong to it: e^-3 ... e^3 or 1e-12 ... e^7.

    Returns:
        rows in order of choice, log_bias and values aligned with them, in float32. Where "omp" finds fewer than t rows
        the others are -1, of bias -inf and values 0.

    Raises:
        ValueError: if shapes do not fit, there is no query, t is not between 1 and N, `select` is unknown, or a known
            row is none.
    """
    _check(queries, keys, values, rows, t, select)
    q, k, v = (x.astype(jnp.float32) for x in (queries, keys, values))
    low, high = BOUNDS[select]
    peak, mass, target, squares = _over_blocks(q, k, v)
    if rows is None and select == "omp":
        rows = _pursuit(_mass(q, k, peak), mass, t)
    elif rows is None:
        rows = jax.lax.top_k(squares, t)[1].astype(jnp.int32)
    rows = rows.astype(jnp.int32)
    real = rows >= 0
    score = jnp.matmul(q, k[jnp.maximum(rows, 0)].T, precision=HIGHEST) * q.shape[1] ** -0.5
    part = jnp.where(real[None], jnp.exp(score - peak[:, None]), 0.0)
    log_bias = jnp.where(real, _fit_bias(part, mass, low, high, STEPS[select]), -jnp.inf)
    weights = jax.nn.softmax(jnp.where(real[None], score + log_bias[None], -jnp.inf), axis=-1)
    fitted = jnp.where(real[:, None], _least_squares(weights, target), 0.0)
    return rows, log_bias, fitted


def _check(queries: Array, keys: Array, values: Array, rows: Array | None, t: int, select: str) -> None:
    if keys.shape != values.shape or queries.shape[1:] != keys.shape[1:]:
        raise ValueError(
            "queries must be [n,D], keys and values [N,D] with the same D, "
            f"got {queries.shape}, {keys.shape} and {values.shape}."
        )
    if len(queries) == 0:
        raise ValueError("queries must be at least 1, got none.")
    if select not in BOUNDS:
        raise ValueError(f'select must be "rms" or "omp", got {select!r}.')
    check_counts(1, t=t)
    if t > keys.shape[0]:
        raise ValueError(f"t must be at most {keys.shape[0]}, the number of keys, got {t}.")
    if rows is not None and rows.shape != (t,):
        raise ValueError(f"rows must be t = {t} numbers of rows, got shape {rows.shape}.")
    known = None if rows is None else concrete(rows)
    if known is not None and (known.min() < -1 or known.max() >= len(keys)):
        wrong = known[(known < -1) | (known >= len(keys))][0]
        raise ValueError(f"rows must be between 0 and {len(keys) - 1}, or -1 for none, got {wrong}.")


def _mass(q: Float[Array, "n D"], k: Float[Array, "N D"], peak: Float[Array, " n"]) -> Float[Array, "n N"]:
    return jnp.exp(jnp.matmul(q, k.T, precision=HIGHEST) * q.shape[1] ** -0.5 - peak[:, None])


def _over_blocks(
    q: Float[Array, "n D"], k: Float[Array, "N D"], v: Float[Array, "N D"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, "n D"], Float[Array, " N"]]:
    """Greatest logit, mass and output of each query, and the sum of each row's squared attention, in query blocks."""

    def one(query: Float[Array, " D"]) -> tuple[Array, Array, Array]:
        score = jnp.matmul(k, query, precision=HIGHEST) * q.shape[1] ** -0.5
        peak = jnp.max(score)
        mass = jnp.exp(score - peak)
        total = jnp.sum(mass)
        return peak, total, jnp.matmul(mass, v, precision=HIGHEST) / total

    block = max(1, min(q.shape[0], MASS_AT_ONCE // k.shape[0]))
    peak, mass, target = jax.lax.map(one, q, batch_size=block)

    def add(squares: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        query, peak, mass = part
        return squares + jnp.sum((_mass(query, k, peak) / mass[:, None]) ** 2, axis=0), None

    # Queries of zeros that get an infinite mass fill the last block up: their attention is 0.
    size = -(-q.shape[0] // block) * block - q.shape[0]
    blocks = (
        jnp.pad(q, ((0, size), (0, 0))).reshape(-1, block, q.shape[1]),
        jnp.pad(peak, (0, size)).reshape(-1, block),
        jnp.pad(mass, (0, size), constant_values=jnp.inf).reshape(-1, block),
    )
    squares, _ = jax.lax.scan(add, jnp.zeros(k.shape[0], jnp.float32), blocks)
    return peak, mass, target, squares


def _least_squares(matrix: Float[Array, "n t"], target: Float[Array, "n *D"]) -> Float[Array, "t *D"]:
    """Least squares of minimum norm."""
    return jnp.linalg.lstsq(matrix, target)[0]


def _fit_bias(
    part: Float[Array, "n t"], mass: Float[Array, " n"], low: float, high: float, steps: int
) -> Float[Array, " t"]:
    """Logarithm of the weights of the rows: clipped least squares, then projected steps of gradient descent."""
    bounded = partial(jnp.clip, min=np.exp(low), max=np.exp(high))
    weight = bounded(_least_squares(part, mass))
    if steps:
        curvature = jnp.linalg.norm(part, ord=2) ** 2
        for _ in range(steps):
            error = jnp.matmul(part, weight, precision=HIGHEST) - mass
            weight = bounded(weight - jnp.matmul(part.T, error, precision=HIGHEST) / curvature)
    return jnp.log(weight)


# --- orthogonal matching pursuit ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Pursuit:
    """Rows so far, in order, and the QR decomposition of their columns: q r = P_rows.

    Attributes:
        rows: -1 where there is none yet.
        count: of rows.
        q: orthonormal columns, zeros where there is none or it depends on those before it.
        r: upper triangle, the unit matrix where there is none.
        rest: of the mass that the rows do not make up.
        free: rows that may still be chosen.
        checks: how often rows were thrown out.
        done: whether the rows stay as they are.
    """

    rows: Int[Array, " t"]
    count: Int[Array, ""]
    q: Float[Array, "n t"]
    r: Float[Array, "t t"]
    rest: Float[Array, " n"]
    free: Bool[Array, " N"]
    checks: Int[Array, ""]
    done: Bool[Array, ""]


def _pursuit(columns: Float[Array, "n N"], mass: Float[Array, " n"], t: int) -> Int[Array, " t"]:
    """The rows whose columns make up the mass, the next always the one with the largest product with the rest."""
    n, count = columns.shape

    def empty(free: Bool[Array, " N"], checks: Int[Array, ""]) -> _Pursuit:
        none = jnp.full(t, -1, jnp.int32), jnp.int32(0), jnp.zeros((n, t), jnp.float32), jnp.eye(t, dtype=jnp.float32)
        return _Pursuit(*none, mass, free, checks, jnp.asarray(False))

    def choose(state: _Pursuit) -> _Pursuit:
        product = jnp.matmul(state.rest, columns, precision=HIGHEST)
        row = jnp.argmax(jnp.where(state.free, product, -jnp.inf)).astype(jnp.int32)
        return _with_rest(_with_row(state, columns, row), columns, mass)

    def check(state: _Pursuit) -> _Pursuit:
        """Throw out for good what counts nearly nothing, and decompose what stays anew."""
        weak = (state.rows >= 0) & (jnp.log(_weights(state, mass)) < LEAST_LOG_WEIGHT)
        last = ~jnp.any(weak) | (state.checks >= CHECKS)

        def again(i: Int[Array, ""], now: _Pursuit) -> _Pursuit:
            keep = (state.rows[i] >= 0) & ~weak[i]
            return jax.lax.cond(keep, lambda now: _with_row(now, columns, state.rows[i]), lambda now: now, now)

        thrown = jax.lax.fori_loop(0, t, again, empty(state.free, state.checks + 1))
        thrown = _with_rest(thrown, columns, mass)
        result = jax.tree.map(partial(jnp.where, last), state, thrown)
        return replace(result, done=last | ~jnp.any(result.free))

    def step(state: _Pursuit) -> _Pursuit:
        full = (state.count >= t) | ~jnp.any(state.free)
        return jax.lax.cond(full, check, choose, state)

    start = empty(jnp.ones(count, bool), jnp.int32(0))
    return jax.lax.while_loop(lambda state: ~state.done, step, start).rows


def _with_row(state: _Pursuit, columns: Float[Array, "n N"], row: Int[Array, ""]) -> _Pursuit:
    """One more row; its column is made orthogonal to the others twice, as once is not enough in float32."""
    column = columns[:, row]
    once = jnp.matmul(column, state.q, precision=HIGHEST)
    rest = column - jnp.matmul(state.q, once, precision=HIGHEST)
    twice = jnp.matmul(rest, state.q, precision=HIGHEST)
    rest = rest - jnp.matmul(state.q, twice, precision=HIGHEST)
    length = jnp.linalg.norm(rest)
    depends = length <= DEPENDENT * jnp.linalg.norm(column)
    at = state.count
    return replace(
        state,
        rows=state.rows.at[at].set(row),
        count=at + 1,
        q=state.q.at[:, at].set(jnp.where(depends, 0.0, rest / length)),
        r=state.r.at[:, at].set((once + twice).at[at].set(jnp.where(depends, 1.0, length))),
        free=state.free.at[row].set(False),
    )


def _with_rest(state: _Pursuit, columns: Float[Array, "n N"], mass: Float[Array, " n"]) -> _Pursuit:
    weight = jnp.where(state.rows >= 0, _weights(state, mass), 0.0)
    made_up = jnp.matmul(columns[:, jnp.maximum(state.rows, 0)], weight, precision=HIGHEST)
    return replace(state, rest=mass - made_up)


def _weights(state: _Pursuit, mass: Float[Array, " n"]) -> Float[Array, " t"]:
    """Clipped least squares of the mass in the columns of the rows."""
    right = jnp.matmul(mass, state.q, precision=HIGHEST)
    low, high = BOUNDS["omp"]
    return jnp.clip(jax.scipy.linalg.solve_triangular(state.r, right), np.exp(low), np.exp(high))
