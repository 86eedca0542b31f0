"""Numbers rounded to codes of 8 or 4 bits. A weight is a matrix here as its file has it, [outputs, inputs].

To the nearest: each group of int4 has the scale and offset of least squares. By what enters the product (GPTQ,
arXiv:2210.17323): the same scales and offsets; input after input, the inputs that are not yet rounded make good what
the codes before them are off.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

from clusterkv_jax.checkpoints.repack import Coded, group_size, with_scales
from clusterkv_jax.storage.digests import CHUNK

# Rounds of least squares: codes, then the best scale and offset for these. More gain less than 1 % of the error.
_ROUNDS = 6
# Inputs that are rounded one by one before all inputs behind them are moved, and what is added to each mean square of
# inputs, as a share of all: moments of few tokens have no inverse.
_INPUTS, _DAMPING = 32, 0.01


def rounded(
    numbers: Float[np.ndarray, "outputs inputs"],
    kind: Literal["int8", "int4"],
    moments: Float[np.ndarray, "inputs inputs"] | None = None,
) -> Coded | None:
    """Numbers in codes: int8 with a scale for each output, int4 with one, and an offset, for each group.

    `moments` are the mean products of any two inputs, by which int4 is rounded; None rounds to the nearest code.
    Returns None where no group divides the inputs.
    """
    numbers = numbers.astype(np.float32)
    if kind == "int8":
        scales = np.abs(numbers).max(axis=1, keepdims=True) / 127
        codes = np.rint(numbers / np.where(scales > 0, scales, 1))
        return Coded(kind, np.clip(codes, -127, 127).astype(np.int8), scales)
    size = group_size(numbers.shape[1])
    if size is None:
        return None
    groups = numbers.reshape(len(numbers), -1, size)
    step = max(1, CHUNK // numbers.shape[1])
    parts = [_least_squares(groups[i : i + step]) for i in range(0, len(groups), step)]
    made = with_scales(kind, np.empty(0), *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    assert made.offsets is not None
    scales, offsets = made.scales.astype(np.float32), made.offsets.astype(np.float32)
    if moments is None:
        codes = _nearest(groups, scales[..., None], offsets[..., None]).reshape(numbers.shape)
    else:
        codes = _with_feedback(numbers, scales, offsets, moments)
    return Coded(kind, (codes + 8).astype(np.uint8), made.scales, made.offsets)


def _nearest(numbers: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Codes from -8 to 7."""
    return np.clip(np.rint((numbers - offsets) / np.where(scales > 0, scales, 1)), -8, 7)


def _least_squares(groups: Float[np.ndarray, "outputs groups size"]) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of groups, begun with those whose codes reach from the least number to the largest."""
    least, most, mean = groups.min(axis=-1), groups.max(axis=-1), groups.mean(axis=-1)
    scales, offsets = (most - least) / 15, least + (most - least) * 8 / 15
    for _ in range(_ROUNDS):
        codes = _nearest(groups, scales[..., None], offsets[..., None])
        centre = codes.mean(axis=-1)
        codes -= centre[..., None]
        covariance, variance = np.vecdot(codes, groups), np.vecdot(codes, codes)
        scales = np.where(covariance > 0, covariance / np.where(variance > 0, variance, 1), scales)
        offsets = mean - scales * centre
    return scales, offsets


def _with_feedback(
    numbers: Float[np.ndarray, "outputs inputs"],
    scales: Float[np.ndarray, "outputs groups"],
    offsets: Float[np.ndarray, "outputs groups"],
    moments: Float[np.ndarray, "inputs inputs"],
) -> Float[np.ndarray, "outputs inputs"]:
    """Codes from -8 to 7. The inputs with the largest mean squares come first: what others can make good is most."""
    count = len(moments)
    order = np.argsort(-np.diag(moments), kind="stable")
    feedback = _feedback(moments[np.ix_(order, order)])
    groups = order // (count // scales.shape[1])
    left = np.ascontiguousarray(numbers.T[order])  # an input's numbers side by side
    scales, offsets = np.ascontiguousarray(scales.T), np.ascontiguousarray(offsets.T)
    codes = np.empty_like(left)
    for first in range(0, count, _INPUTS):
        last = min(first + _INPUTS, count)
        errors = np.empty((last - first, left.shape[1]), np.float32)
        for i in range(first, last):
            scale, offset = scales[groups[i]], offsets[groups[i]]
            codes[i] = _nearest(left[i], scale, offset)
            errors[i - first] = left[i] - (codes[i] * scale + offset)
            left[i + 1 : last] -= feedback[i, i + 1 : last, None] * errors[i - first]
        left[last:] -= feedback[first:last, last:].T @ errors
    found = np.empty_like(codes)
    found[order] = codes
    return found.T


def _feedback(moments: Float[np.ndarray, "inputs inputs"]) -> Float[np.ndarray, "inputs inputs"]:
    """How much the inputs behind each one, in its row, are lowered for an error of 1.

    That is the upper factor of the inverse moments, by rows divided by the diagonal.
    """
    mean = float(np.mean(np.diag(moments)))
    damped = moments.astype(np.float64) + (_DAMPING * mean or 1.0) * np.eye(len(moments))
    # Of the moments' factor that is upper, not of the inverse: that is a Cholesky from the last input to the first.
    inverse = np.linalg.inv(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1])
    return (inverse / np.diag(inverse)[:, None]).astype(np.float32)
