"""What callers pass as arrays: their dimensions by letters, their types, and their numbers where those are known.

Shapes and types are known under a jit too. Numbers are not: a check of them lets a tracer pass.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax.runtime.errors import shown

# Squares of numbers up to this size, summed over all entries of any text, are finite in float32.
LARGEST = 1e14
# Scores are compared and no more.
LARGEST_SCORE = float(np.finfo(np.float32).max)
# Arrays count in int32: sums of two such numbers fit.
MOST = 2**30 - 1


def check_array(name: str, x: Any, letters: str, kind: Any = jnp.floating) -> None:
    """Raise ValueError unless x is an array of this kind of numbers with one dimension for each of the letters."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(f"{name} must be an array [{letters}], got {type(x).__name__}.")
    if len(shape) != len(letters.split(",")):
        raise ValueError(f"{name} must be an array [{letters}], got shape {shape}.")
    if not jnp.issubdtype(dtype, kind):
        numbers = "floating-point" if kind is jnp.floating else "whole"
        raise ValueError(f"{name} must be an array of {numbers} numbers, got {dtype}.")


def check_keys(keys: Any, values: Any) -> None:
    """Raise ValueError unless keys and values are both floating-point [B,K,N,D], and none of these is 0."""
    for name, x in (("keys", keys), ("values", values)):
        check_array(name, x, "B,K,N,D")
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape, got {keys.shape} and {values.shape}.")
    if 0 in keys.shape:
        raise ValueError(f"keys must have at least one token, head and dimension, got shape {keys.shape}.")


def check_queries(name: str, queries: Any, batch: int, kv_heads: int, *rest: int) -> None:
    """Raise ValueError unless queries are floating-point [B,H,N,D] or [B,H,D], with N and D as in `rest`."""
    check_array(name, queries, "B,H,N,D" if len(rest) == 2 else "B,H,D")
    heads = queries.shape[1]
    if (queries.shape[0], *queries.shape[2:]) != (batch, *rest) or heads == 0 or heads % kv_heads:
        sizes = ",".join(map(str, (batch, "H", *rest)))
        raise ValueError(
            f"{name} must have the shape [{sizes}] with H a multiple of the {kv_heads} KV heads, got {queries.shape}."
        )


def check_flag(**flag: Any) -> bool:
    """The value of a named argument that must be True or False. Raises ValueError, naming it, for anything else."""
    ((name, value),) = flag.items()
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")
    return value


def check_counts(least: int, most: int = MOST, **counts: Any) -> None:
    """Raise ValueError for the first of these numbers that is no whole number from `least` to `most`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {shown(count)}.")
        if count > most:
            raise ValueError(f"{name} must be at most {most}, got {shown(count)}.")


def check_key(key: Any) -> None:
    """Raise ValueError unless key is a PRNG key, typed or as its numbers, or None."""
    array = isinstance(key, jax.Array)
    typed = array and key.ndim == 0 and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key is not None and not typed and not (array and key.ndim == 1 and key.dtype == jnp.uint32):
        raise ValueError(f"key must be a PRNG key such as jax.random.key(0), or None, got {shown(key)}.")


def concrete(x: Any) -> np.ndarray | None:
    """The numbers of an array; None under a jit that traces them, and where other hosts hold some of them."""
    if isinstance(x, jax.core.Tracer):
        return None
    here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x) if here else None


def on_host(x: Any) -> bool:
    """Whether looking at the numbers of an array costs nothing: they are known, and in the host's memory."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or all(device.platform == "cpu" for device in x.devices())


def check_lengths(lengths: Any, batch: int, width: int) -> np.ndarray | None:
    """The lengths as numbers, None where they are traced.

    Raises ValueError unless they are whole numbers, one for each sequence, in 1 ... width.
    """
    numbers = concrete(lengths)
    kind = lengths.dtype if numbers is None else numbers.dtype
    if not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(f"lengths must be whole numbers, got {kind}.")
    outside = numbers is not None and not ((numbers >= 1) & (numbers <= width)).all()
    if outside or np.shape(lengths) != (batch,):
        got = f"shape {np.shape(lengths)}" if numbers is None else numbers.tolist()
        raise ValueError(f"lengths must be {batch} numbers between 1 and {width}, got {got}.")
    return numbers


def check_ids(tokens: Any, vocab_size: int, lengths: np.ndarray | None = None) -> None:
    """Raise ValueError if one of the ids [B] or [B,N], not those at or beyond `lengths`, is no id of the vocabulary."""
    numbers = concrete(tokens)
    if numbers is None:
        return
    wrong = (numbers < 0) | (numbers >= vocab_size)
    if lengths is not None:
        wrong &= np.arange(numbers.shape[1]) < lengths[:, None]
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        where = ", ".join(f"{name} {i}" for name, i in zip(("sequence", "token"), at, strict=False))
        raise ValueError(f"tokens hold id {numbers[at]} ({where}); allowed are 0 to {vocab_size - 1}.")


def largest(name: str) -> float:
    """The size that numbers of an array of this name may have."""
    return LARGEST_SCORE if name == "scores" else LARGEST


def sound(x: Float[Array, "B _ N _"], lengths: Int[Array, " B"], most: float = LARGEST) -> Bool[Array, ""]:
    """Whether the numbers of all tokens before `lengths` are finite and no larger than `most`; for use in a jit."""
    padding = (jnp.arange(x.shape[2], dtype=jnp.int32)[None] >= lengths[:, None])[:, None, :, None]
    return jnp.all((jnp.abs(x.astype(jnp.float32)) <= most) | padding)


def refuse_unsound(found: dict[str, Bool[Array, ""]], lengths: np.ndarray | None, arrays: dict[str, Any]) -> None:
    """Raise ValueError for the first array that is not `sound`; nothing where that is traced. Tokens are dimension 2 of
    all but `hidden` [B,N,M].
    """
    if any(isinstance(x, jax.core.Tracer) for x in (*found.values(), *arrays.values())):
        return
    for name, fine in jax.device_get(found).items():
        if not fine:
            x = np.asarray(arrays[name], np.float32)
            wrong = ~(np.abs(x) <= largest(name))
            if lengths is not None:
                tokens = 1 if name == "hidden" else 2
                padding = np.arange(x.shape[tokens]) >= lengths[:, None]
                wrong &= ~np.expand_dims(padding, [axis for axis in range(1, x.ndim) if axis != tokens])
            at = np.argwhere(wrong)[0]
            raise ValueError(
                f"{name} must be finite numbers of at most {largest(name):g} in size, "
                f"got {x[tuple(at)]} at {at.tolist()}."
            )
