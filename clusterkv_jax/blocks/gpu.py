"""What the blocks' GPU backends take: few tokens, whose launches take longer than their numbers."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from clusterkv_jax.blocks.config import ModelConfig
from clusterkv_jax.kernels.weight_codes import is_coded
from clusterkv_jax.runtime.dispatch import LeftToXLA
from clusterkv_jax.runtime.sharding import on_one_device, ways

MOST = 16  # tokens
WHOLE = 64  # inputs and outputs: what fills no block is XLA's
SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)
TOKENS: Any = ("batch", None, None)


def few_on_one_device(x: Float[Array, "B T ..."]) -> bool:
    """Whether these are few tokens, and whole on one device."""
    return x.shape[0] * x.shape[1] <= MOST and on_one_device()


def check_few(x: Float[Array, "B T ..."], *sizes: int) -> None:
    """Raise LeftToXLA but for few tokens of each device, of 16 bits, with inputs and outputs in whole blocks."""
    most = MOST * math.gcd(x.shape[0], ways("batch"))
    if x.shape[0] * x.shape[1] > most or x.dtype not in SIXTEEN_BITS or any(size % WHOLE for size in sizes):
        raise LeftToXLA(
            f"Products of up to {most} tokens of 16 bits with inputs and outputs in multiples of {WHOLE} have a "
            f"kernel, got {x.shape} of {x.dtype} and {sizes}."
        )


def check_numbers(*weights: Any) -> None:
    """Raise LeftToXLA for weights in codes, whose kernels are those of `linear`."""
    if any(map(is_coded, weights)):
        raise LeftToXLA("Weights in codes are multiplied by `linear` alone.")


def is_one_after_rms(config: ModelConfig, x: Float[Array, "B T M"]) -> bool:
    """Whether this is one token, and a kernel has its norm: of several XLA takes one launch itself."""
    return x.shape[0] * x.shape[1] == 1 and config.norm == "rms" and config.norm_place != "after"


def rows_of(x: Float[Array, "B T *rest"]) -> Float[Array, "n width"]:
    """The tokens of all sequences, their numbers in one dimension."""
    return x.reshape(x.shape[0] * x.shape[1], -1)
