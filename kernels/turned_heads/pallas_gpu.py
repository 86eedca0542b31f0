"""Normalised and turned heads on GPU: one launch for queries and keys, where XLA has two for each.

A program per head of a token.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from clusterkv_jax.kernels.gpu import DTYPES, arange, call, differentiated_by, power_of_two
from clusterkv_jax.kernels.turned_heads import reference


def turned_heads(q, k, q_scale, k_scale, cos, sin, *, eps, offset, interpret=False):
    """See `clusterkv_jax.kernels.turned_heads.turned_heads`."""
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise NotImplementedError(f"The GPU kernel of turned_heads takes heads of one float type, got {q.dtype}.")
    return _run((eps, offset, interpret), q, k, q_scale, k_scale, cos, sin)


@differentiated_by(lambda options: partial(reference.turned_heads, eps=options[0], offset=options[1]))
def _run(options, *operands):
    eps, offset, interpret = options
    q, k = operands[:2]
    return call(
        partial(_kernel, eps=eps, offset=offset),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)),
        *operands,
        grid=(q.shape[1] + k.shape[1], len(q)),
        warps=1,
        interpret=interpret,
    )


def _kernel(q, k, q_scale, k_scale, cos, sin, q_out, k_out, *, eps, offset):
    head, token, queries = pl.program_id(0), pl.program_id(1), q.shape[1]
    half = q.shape[2] // 2
    pair = arange(power_of_two(half))
    inside = pair < half

    def turn(x, scale, out, head):
        def load(ref):
            return plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32)

        a, b = load(x.at[token, head, pair]), load(x.at[token, head, half + pair])
        factor = jax.lax.rsqrt((jnp.sum(a * a) + jnp.sum(b * b)) / (2 * half) + eps)
        a = a * factor * (offset + load(scale.at[pair]))
        b = b * factor * (offset + load(scale.at[half + pair]))
        c, s = load(cos.at[token, pair]), load(sin.at[token, pair])
        plgpu.store(out.at[token, head, pair], (a * c - b * s).astype(out.dtype), mask=inside)
        plgpu.store(out.at[token, head, half + pair], (b * c + a * s).astype(out.dtype), mask=inside)

    @pl.when(head < queries)
    def _():
        turn(q, q_scale, q_out, head)

    @pl.when(head >= queries)
    def _():
        turn(k, k_scale, k_out, head - queries)
