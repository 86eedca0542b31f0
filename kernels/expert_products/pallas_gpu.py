"""The experts of few tokens on GPU: two launches, and a sum that XLA joins to what follows.

    grid (blocks of hidden units, tokens x experts of each)     gate and up, the activation
    grid (blocks of outputs, tokens x experts of each)          down, times the share

Bytes: the weights of the chosen experts. Of one token every program finds its expert among the logits: XLA would take
four launches for that, the search less than the first weights' arrival. Several tokens are sorted by expert, so that
those of one expert read its weights together, and from memory once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.expert_products import reference
from clusterkv_jax.kernels.gpu import arange, call, differentiated_by, dot, only_row, power_of_two, whole_block
from clusterkv_jax.kernels.tuning import blocks

MOST_TOKENS = 16
LEAST = 16  # inputs and outputs of a block, as the matrix unit wants
RANKED = 32  # logits that all others are compared with at a time
SIZES = {"block": 32, "depth": 128, "warps": 4, "stages": 4}


def expert_products(x, logits, gate, up, down, *, per_token, normalize, sizes=None, down_sizes=None, interpret=False):
    """See `clusterkv_jax.kernels.expert_products.expert_products`.

    `sizes` go before what was measured on this device (`kernels.tuning`): outputs of a program, inputs at a time, warps
    and `stages`, blocks on their way at once; those of the last product are `down_sizes`.
    """
    if len(x) > MOST_TOKENS:
        raise NotImplementedError(f"The GPU kernel of expert_products takes up to {MOST_TOKENS} tokens, got {len(x)}.")
    if any(w.dtype != jnp.bfloat16 for w in (x, gate, up, down)):
        raise NotImplementedError(f"The GPU kernel of expert_products takes bfloat16, got {x.dtype} and {gate.dtype}.")
    _, inputs, units = gate.shape
    into = SIZES | blocks("expert_products", inputs=inputs, outputs=units) | dict(sizes or {})
    out = SIZES | blocks("expert_products", inputs=units, outputs=inputs) | dict(down_sizes or {})
    into |= {"block": whole_block(into["block"], units), "depth": whole_block(into["depth"], inputs)}
    out |= {"block": whole_block(out["block"], inputs), "depth": whole_block(out["depth"], units)}
    if min(into["block"], into["depth"], out["block"], out["depth"]) < LEAST:
        raise NotImplementedError(
            f"The GPU kernel of expert_products takes inputs and hidden units in blocks of {LEAST}, got {inputs} and "
            f"{units}."
        )
    static = tuple(sorted(into.items())), tuple(sorted(out.items()))
    return _run((per_token, normalize, *static, interpret), x, logits, gate, up, down)


@differentiated_by(lambda options: partial(reference.expert_products, per_token=options[0], normalize=options[1]))
def _run(options, x, logits, gate, up, down):
    per_token, normalize, into, out, interpret = options
    into, out = dict(into), dict(out)
    rows, (_, inputs, units) = len(x) * per_token, gate.shape
    route = {"per_token": per_token, "normalize": normalize}
    routed = None if len(x) == 1 else _sorted(logits, **route)
    inner = call(
        partial(_into, block=into["block"], depth=into["depth"], **route),
        jax.ShapeDtypeStruct((rows, units), x.dtype),
        *(x, logits, routed, gate, up),
        grid=(units // into["block"], rows),
        warps=into["warps"],
        stages=into["stages"],
        interpret=interpret,
    )
    outputs = call(
        partial(_out, block=out["block"], depth=out["depth"], **route),
        jax.ShapeDtypeStruct((rows, inputs), jnp.float32),
        *(inner, logits, routed, down),
        grid=(inputs // out["block"], rows),
        warps=out["warps"],
        stages=out["stages"],
        interpret=interpret,
    )
    return jnp.sum(outputs.reshape(len(x), per_token, inputs), axis=1).astype(x.dtype)


def _sorted(logits, per_token, normalize):
    """The way of each row by the experts' order: its number as token after token has it, its expert and share."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), per_token)
    if normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    experts, shares = chosen.reshape(-1), shares.reshape(-1)
    order = jnp.argsort(experts)
    return order.astype(jnp.int32), experts[order], shares[order]


def _into(x, logits, routed, gate, up, out, *, block, depth, per_token, normalize):
    row, expert, _ = _way(logits, routed, per_token, normalize)
    columns, inputs = arange(block, pl.program_id(0) * block), x.shape[1]

    def body(i, state):
        k = arange(depth, i * depth)
        rows = only_row(plgpu.load(x.at[row // per_token, k]))
        weights = (plgpu.load(w.at[expert, k[:, None], columns[None, :]]) for w in (gate, up))
        return [total + dot(rows, some) for total, some in zip(state, weights, strict=True)]

    zeros = only_row(jnp.zeros((block,), jnp.float32))
    gates, ups = jax.lax.fori_loop(0, inputs // depth, body, [zeros, zeros])
    inner = jnp.sum(gates / (1 + jnp.exp(-gates)) * ups, axis=0)
    plgpu.store(out.at[row, columns], inner.astype(out.dtype))


def _out(inner, logits, routed, down, out, *, block, depth, per_token, normalize):
    row, expert, share = _way(logits, routed, per_token, normalize)
    columns, units = arange(block, pl.program_id(0) * block), inner.shape[1]

    def body(i, total):
        k = arange(depth, i * depth)
        rows = only_row(plgpu.load(inner.at[row, k]))
        return total + dot(rows, plgpu.load(down.at[expert, k[:, None], columns[None, :]]))

    total = jax.lax.fori_loop(0, units // depth, body, only_row(jnp.zeros((block,), jnp.float32)))
    plgpu.store(out.at[row, columns], jnp.sum(total, axis=0) * share)


def _way(logits, routed, per_token, normalize):
    """The row of this program: its number, expert and share."""
    number = pl.program_id(1)
    if routed is not None:
        return tuple(part[number] for part in routed)
    return number, *_chosen(logits, number, per_token, normalize)


def _chosen(logits, place, per_token, normalize):
    """The expert of the only token at this place among its best ones, and its share."""
    count = logits.shape[1]
    number = arange(power_of_two(count, 16))
    value = plgpu.load(logits.at[0, number], mask=number < count, other=-jnp.inf)
    # All places at once: one maximum after the other would take two sums over the threads for each.
    rank = jnp.zeros(number.shape, jnp.int32)
    for start in range(0, count, RANKED):
        rival = arange(RANKED, start)
        its_value = plgpu.load(logits.at[0, rival], mask=rival < count, other=-jnp.inf)[:, None]
        first = rival[:, None] < number[None, :]
        before = (its_value > value[None, :]) | ((its_value == value[None, :]) & first)
        rank += jnp.sum(before.astype(jnp.int32), axis=0)
    expert = jnp.max(jnp.where((rank == place) & (number < count), number, 0))
    part = jnp.exp(value - jnp.max(value))
    share = jnp.sum(jnp.where(number == expert, part, 0.0))
    return expert, share / jnp.sum(jnp.where(rank < per_token, part, 0.0) if normalize else part)
