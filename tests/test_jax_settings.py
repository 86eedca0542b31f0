"""Settings of JAX that a caller's program may have: the same answers under all of them."""

import jax

import clusterkv_jax as ckv
from tests.support.tiny import prompt, tiny

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
