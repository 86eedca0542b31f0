"""A surrogate with one inner layer, fitted to scores (KVzap, 2601.07891, section 4); needs optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from clusterkv_jax.learned.ridge import SurrogateFit, check_rows
from clusterkv_jax.learned.surrogates import predicted_scores
from clusterkv_jax.runtime.prng import seed_key

# KVzap's recipe; the inner layer has inputs / 8 units.
RATE, DECAY, EPOCHS, BATCH, HELD_OUT = 5e-3, 1e-2, 15, 512, 0.05
Parameters = dict[str, Array]


def fit_mlp(hidden: Float[np.ndarray, "R M"], scores: Float[np.ndarray, "R K"], seed: int = 0) -> SurrogateFit:
    """The surrogate with an inner layer, by AdamW with a cosine schedule (KVzap's recipe); what it explains is measured
    on the last rows, which are held out.

    Raises ValueError if there are no more rows than inputs.
    """
    rows, inputs = hidden.shape
    check_rows(rows, inputs)
    train = rows - max(1, int(HELD_OUT * rows))
    mean, scale = hidden[:train].mean(axis=0), hidden[:train].std(axis=0) + 1e-6
    x, y = jnp.asarray((hidden - mean) / scale, jnp.float32), jnp.asarray(scores, jnp.float32)
    steps = EPOCHS * max(1, train // BATCH)
    start = _start(seed_key(seed), inputs, y[:train].mean(axis=0))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(RATE, steps), weight_decay=DECAY)
    )

    def error(parameters: Parameters, x: Array, y: Array) -> Array:
        return jnp.mean((predicted_scores(parameters, x[None])[0].T - y) ** 2)

    def step(state: Any, key: Array) -> tuple[Any, None]:
        parameters, memory = state
        batch = jax.random.randint(key, (BATCH,), 0, train)
        update, memory = optimizer.update(jax.grad(error)(parameters, x[batch], y[batch]), memory, parameters)
        return (optax.apply_updates(parameters, update), memory), None

    keys = jax.random.split(seed_key(seed + 1), steps)
    # optax divides whole numbers, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        (fit, _), _ = jax.jit(lambda start: jax.lax.scan(step, (start, optimizer.init(start)), keys))(start)
    rest = np.asarray(jnp.mean((predicted_scores(fit, x[None, train:])[0].T - y[train:]) ** 2, axis=0))
    arrays = {name: np.array(value) for name, value in fit.items()}
    arrays["inner_weights"] /= scale[:, None].astype(np.float32)
    arrays["inner_bias"] -= (mean.astype(np.float32) @ arrays["inner_weights"]).astype(np.float32)
    total = np.maximum(scores[train:].var(axis=0), np.finfo(np.float32).tiny)
    return SurrogateFit(arrays, 1 - rest / total, rest)


def _start(key: Array, inputs: int, bias: Float[Array, " K"]) -> Parameters:
    units, (inner, outer) = max(1, inputs // 8), jax.random.split(key)
    return {
        "inner_weights": jax.random.normal(inner, (inputs, units)) * inputs**-0.5,
        "inner_bias": jnp.zeros(units),
        "weights": jax.random.normal(outer, (units, *bias.shape)) * units**-0.5,
        "bias": bias,
    }
