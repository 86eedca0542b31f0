"""A token behind attention through a layer of experts on Hopper: one launch, where there were five.

The launch is in `mosaic`, which takes its time to import: whoever has another GPU or none does without.
"""

from functools import partial

import jax

from clusterkv_jax.kernels.expert_block import reference
from clusterkv_jax.kernels.expert_block.plan import Plan, refusal


def expert_block(
    splits, hidden, projection, scale, router, gate, up, down, *, per_token, normalize, eps, offset
):  # fmt: skip
    """See `clusterkv_jax.kernels.expert_block.expert_block`."""
    operands = hidden, projection, scale, router, gate, up, down
    types = {x.dtype for x in operands}
    if reason := refusal(splits.parts.shape, projection.shape, gate.shape, per_token, *types):
        raise NotImplementedError(f"The GPU kernel of expert_block {reason}.")
    return _run((per_token, normalize, eps, offset), splits, *operands)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, splits, *operands):
    from clusterkv_jax.kernels.expert_block.mosaic import run

    per_token, normalize, eps, offset = options
    plan = Plan.of(splits.parts.shape, operands[1].shape, operands[4].shape, per_token)
    return run(plan, splits, *operands, normalize=normalize, eps=eps, offset=offset)


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    names = ("per_token", "normalize", "eps", "offset")
    definition = partial(reference.expert_block, **dict(zip(names, options, strict=True)))
    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]
