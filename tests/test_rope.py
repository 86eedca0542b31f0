"""Rotary embedding against its definitions."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.blocks.rope import cosines_and_sines, frequencies, rotate
from clusterkv_jax.models.config import LinearScaling, Llama3Scaling, Rope
from tests.test_models import normal, relative


def test_llama3_scaling_by_its_definition():
    rope = Rope(500000.0, 128, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    want = []
    for i in range(64):
        plain = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            want.append(plain)
        elif wavelength > 8192 / 1:
            want.append(plain / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * plain / 8 + smooth * plain)
    np.testing.assert_allclose(frequencies(rope), want, rtol=1e-6)
    np.testing.assert_allclose(frequencies(Rope(1e4, 64, scaling=LinearScaling(8.0))) * 8, frequencies(Rope(1e4, 64)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_relative_and_partial(interleaved):
    rope = Rope(10000.0, 8, interleaved)
    q, k = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)
    turn = jax.jit(partial(rotate, rope=rope))

    def at(x: jax.Array, position: int) -> jax.Array:
        return turn(x, jnp.full((1, 1), position, jnp.int32))

    near, far = (jnp.vdot(at(q, 5 + shift), at(k, 2 + shift)) for shift in (0, 1000))
    assert abs(near - far) < 1e-3
    assert abs(near - jnp.vdot(at(q, 6), at(k, 2))) > 1e-2
    np.testing.assert_array_equal(at(q, 7)[..., 8:], q[..., 8:])
    np.testing.assert_array_equal(at(q, 0), q)
    pair = np.asarray(at(q, 3)).reshape(-1)[[0, 1] if interleaved else [0, 4]]
    a, b = np.asarray(q).reshape(-1)[[0, 1] if interleaved else [0, 4]]
    turned = [a * math.cos(3) - b * math.sin(3), a * math.sin(3) + b * math.cos(3)]
    np.testing.assert_allclose(pair, turned, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_rotated_in_float32():
    rope, positions = Rope(10000.0, 8), jnp.asarray([[100001, 100002]], jnp.int32)
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    got = rotate(x, positions, rope)
    assert got.dtype == jnp.bfloat16
    assert relative(got, rotate(x.astype(jnp.float32), positions, rope)) < 4e-3


def test_the_angles_of_a_long_prompt_are_those_of_its_tokens():
    rope, positions = Rope(10000.0, 8), jnp.arange(2, 1402, dtype=jnp.int32).reshape(2, 700)
    whole = cosines_and_sines(positions, rope)
    pieces = [cosines_and_sines(positions[:, i : i + 100], rope) for i in range(0, 700, 100)]
    for got, want in zip(whole, zip(*pieces, strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.concatenate(want, axis=1), atol=1e-6)
