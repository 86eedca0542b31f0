"""The experts of few tokens: checks, backends, broken variants, derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterkv_jax.kernels.expert_products import pallas_gpu, reference
from tests.kernels.base import changed, compiled, near, normal

BACKENDS = {
    "xla": reference.expert_products,
    "gpu": partial(pallas_gpu.expert_products, interpret=True),
    "gpu-small-blocks": partial(
        pallas_gpu.expert_products,
        sizes={"block": 16, "depth": 16},
        down_sizes={"block": 16, "depth": 32},
        interpret=True,
    ),
}
TWO_PRODUCTS = 1e-2  # of bfloat16 numbers, one after the other

# tokens, experts, experts of a token, inputs, hidden units
EXPERT_SHAPES = [(1, 24, 4, 64, 32), (5, 8, 3, 32, 48), (1, 3, 3, 32, 16)]


def operands(seed, tokens, experts, inputs, units):
    def bf16(i, *shape):
        return jnp.asarray(normal(seed + i, *shape), jnp.bfloat16)

    into = [bf16(i, experts, inputs, units) * jnp.bfloat16(inputs**-0.5) for i in (1, 2)]
    down = bf16(3, experts, units, inputs) * jnp.bfloat16(units**-0.5)
    logits = jnp.asarray(2 * normal(seed + 4, tokens, experts), jnp.float32)
    return bf16(5, tokens, inputs), logits, *into, down


def exact(x, logits, gate, up, down, per_token, normalize):
    """Token after token in float64."""
    x, logits, gate, up, down = (np.asarray(a, np.float64) for a in (x, logits, gate, up, down))
    out = np.zeros_like(x)
    for token, row in enumerate(logits):
        shares = np.exp(row - row.max()) / np.sum(np.exp(row - row.max()))
        best = np.argsort(-row, kind="stable")[:per_token]
        whole = np.sum(shares[best]) if normalize else 1.0
        for expert in best:
            inner = x[token] @ gate[expert]
            inner = inner / (1 + np.exp(-inner)) * (x[token] @ up[expert])
            out[token] += shares[expert] / whole * (inner @ down[expert])
    return out


def check_experts(implementation, *, examples=2):
    for tokens, experts, per_token, inputs, units in EXPERT_SHAPES:
        for normalize in (True, False):
            route = {"per_token": per_token, "normalize": normalize}
            run = compiled(partial(implementation, **route))
            for seed in range(examples):
                args = operands(seed, tokens, experts, inputs, units)
                result = run(*args)
                assert result.dtype == jnp.bfloat16
                near(result, exact(*args, **route), TWO_PRODUCTS, axes=1)


def check_ties(implementation, *, examples=1):
    """Of equal logits the first experts are chosen."""
    for tokens in (1, 3):
        x, logits, *weights = operands(examples, tokens, 8, 32, 16)
        logits = jnp.asarray(np.where(np.arange(8) % 2, 1.0, 0.0), jnp.float32)[None] + 0 * logits
        route = {"per_token": 3, "normalize": True}
        result = compiled(partial(implementation, **route))(x, logits, *weights)
        near(result, exact(x, logits, *weights, **route), TWO_PRODUCTS, axes=1)


wrong = partial(changed, reference.expert_products)
CHECKS = [check_experts, check_ties]
BROKEN = {
    check_experts: [
        wrong("with_the_other_shares", normalize=lambda a: not a.normalize),
        wrong("one_fewer", per_token=lambda a: a.per_token - 1),
        wrong("of_the_first_token", logits=lambda a: jnp.broadcast_to(a.logits[:1], a.logits.shape)),
    ],
    check_ties: [
        wrong(
            "the_last_of_equal_experts",
            logits=lambda a: a.logits[:, ::-1],
            gate=lambda a: a.gate[::-1],
            up=lambda a: a.up[::-1],
            down=lambda a: a.down[::-1],
        )
    ],
}


@pytest.mark.parametrize("op", BACKENDS.values(), ids=BACKENDS)
def test_experts_have_derivatives(op):
    args = operands(0, 2, 4, 32, 16)

    def loss(op, *args):
        return jnp.sum(op(*args, per_token=2, normalize=True).astype(jnp.float32))

    mine, definition = (
        jax.jit(jax.grad(partial(loss, run), argnums=(0, 1, 4)))(*args) for run in (op, BACKENDS["xla"])
    )
    jax.tree.map(np.testing.assert_array_equal, mine, definition)
