"""Settings of JAX that a caller's program may have: the same answers under all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import learned
from tests.support.tiny import EXTEND, extend, prefill, prompt, tiny

WARM = {"sampling": ckv.Sampling(temperature=1.0), "max_new_tokens": 6}


def test_seeds_draw_alike_whatever_keys_jax_makes_by_default():
    """Methods that draw, too; with other keys the draws of neighbours would depend on each other."""
    model, method = tiny(), ckv.CaM(ckv.Budget(tokens=24))
    asked = {"prompts": [prompt(1, 40)] * 2, "seed": [5, 6], **WARM}
    expected = ckv.generate(model, method=method, **asked).tokens
    with jax.default_prng_impl("rbg"):
        assert ckv.generate(model, method=method, **asked).tokens == expected
        served = ckv.Engine(model, method=method, slots=2, max_tokens=64, reserve=16)
        assert [result.tokens[0] for result in served.generate(**asked)] == expected
    assert expected[0] != expected[1]


SMALL = ckv.Budget(tokens=24)


@pytest.mark.parametrize(
    "method", [ckv.CentroidKV(SMALL, sinks=2, recent=4, chunk=16, interval=4), ckv.ClusterKV(SMALL, sinks=2)]
)
def test_numbers_of_64_bits_and_guarded_transfers_change_nothing(method):
    """Constants of programs would have other types, and numbers go to and from the host at every request."""
    model, asked = tiny(), {"prompts": [prompt(1, 40)], "max_new_tokens": 6, "method": method}
    expected = ckv.generate(model, **asked).tokens
    with jax.enable_x64(True), jax.transfer_guard("disallow"):
        assert ckv.generate(model, **asked).tokens == expected


def test_pure_functions_take_arrays_of_64_bits():
    """Ids and lengths have 64 bits where a program has said nothing of their type."""
    model, method = tiny(), ckv.SnapKV(SMALL, window=4, kernel=3)
    expected = ckv.generate(model, [prompt(1, 40)], method=method, max_new_tokens=2).tokens[0]
    with jax.enable_x64(True):
        tokens, lengths = jnp.asarray([prompt(1, 40)]), jnp.asarray([40])
        assert tokens.dtype == jnp.int64
        cache, logits = ckv.prefill(model.params, model.config, method, tokens, lengths)
        step = jax.jit(ckv.decode_step, static_argnames=("config", "method"))
        first = jnp.argmax(logits, axis=-1)
        _, logits = step(model.params, model.config, method, cache, first)
    assert [int(first[0]), int(jnp.argmax(logits[0]))] == expected


def test_a_question_of_64_bits_leaves_a_cache_of_32():
    model, method = tiny(), ckv.SnapKV(SMALL, window=4, kernel=3)
    cache, _ = prefill(method, prompt(1, 40), reserve=8, step_tokens=3)
    question, counts = np.asarray([prompt(2, 3)]), np.asarray([3])
    expected = extend(method, cache, question)
    with jax.enable_x64(True):
        wide = jnp.asarray(question, jnp.int64), jnp.asarray(counts, jnp.int64)
        found = EXTEND(model.params, model.config, method, cache, *wide)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("method", [ckv.SnapKV(SMALL, window=4, kernel=3), ckv.KeyDiff(SMALL)])
def test_methods_that_rank_rows_run_without_jit(method):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(1, heads, 40, 8)), jnp.float32) for heads in (4, 2, 2)]
    expected = ckv.compress(method, *args)
    with jax.disable_jit():
        layer = ckv.compress(method, *args)
    np.testing.assert_array_equal(layer.positions, expected.positions)


def fitted():
    """What loops over numbers: rows found by matching pursuit, values fitted to attention, and a repeated prompt."""
    rng = np.random.default_rng(0)
    queries, keys, values, rows = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (30, 40, 40, 6))
    model, text = tiny(), prompt(1, 32)
    repeated = [jnp.asarray([[1, 2, *text[start : start + 16]]]) for start in (0, 16)]
    return (
        learned.match(queries, keys, values, None, 6, select="omp"),
        learned.refit(queries, keys, values, rows, rows, rows[:, 0]),
        learned.reconstruction(model.params, model.config, jnp.asarray([text]), chunk=16, prompts=repeated),
    )


def test_learned_scores_take_no_notice_of_64_bits():
    expected = fitted()
    with jax.enable_x64(True):
        found = fitted()
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
