"""A token through a layer of experts on Hopper: one launch, where there were nine.

The launch is in `mosaic`, which takes its time to import: whoever has another GPU or none does without.
"""

from functools import partial

import jax
import jax.numpy as jnp

from clusterkv_jax.kernels.expert_layer import reference
from clusterkv_jax.kernels.expert_layer.plan import Plan, refusal


def expert_layer(
    hidden, token, angles, weights, buffers, lengths, *, heads, per_token, normalize, eps, offset
):  # fmt: skip
    """See `clusterkv_jax.kernels.expert_layer.expert_layer`."""
    if reason := refused(hidden.total, weights, buffers, sum(map(len, heads)), per_token):
        raise NotImplementedError(f"The GPU kernel of expert_layer {reason}.")
    options = heads, per_token, normalize, eps, offset
    return _run(options, hidden, token, angles, weights, buffers, lengths)


def refused(hidden, weights, buffers, kv_heads, per_token):
    """Why the kernel does not take a hidden state through this layer; None if it does."""
    rows = [x for keys, values, *_ in buffers for x in (keys, values)]
    types = {x.dtype for x in (hidden, *weights, *rows)}
    return refusal(_plan(weights, kv_heads, per_token), types, [degree.shape[2] for _, _, degree, *_ in buffers])


def _plan(weights, kv_heads, per_token):
    """How the programs would share these weights."""
    dim, (experts, width, units) = weights.q_scale.shape[0], weights.gate.shape
    return Plan(kv_heads, weights.q.shape[0] // dim // kv_heads, dim, width, experts, units, per_token)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, hidden, token, angles, weights, buffers, lengths):
    from clusterkv_jax.kernels.expert_layer.mosaic import run

    heads, per_token, normalize, eps, offset = options
    plan = _plan(weights, sum(map(len, heads)), per_token)
    token = token[0], token[1].astype(jnp.int32)
    settings = {"heads": heads, "normalize": normalize, "eps": eps, "offset": offset}
    return run(plan, hidden, token, angles, weights, buffers, lengths, **settings)


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    names = ("heads", "per_token", "normalize", "eps", "offset")
    definition = partial(reference.expert_layer, **dict(zip(names, options, strict=True)))
    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]
