"""What of a layer may be taken apart: slots by devices, heads as sequences of their own."""

from clusterkv_jax.methods.base import Method


def slots_shardable(method: Method) -> bool:
    """Whether devices may share the slots of a head: steps only append to the rows there are and attend to them."""
    return method.schedule.kind in ("append", "interval") and method.storage in ("tokens", "centroids", "moved")


def is_by_head(method: Method, num_layers: int) -> bool:
    """Whether heads of unequal budgets may be compressed as sequences of their own: each knows of no other, and steps
    only append to rows and attend to them.
    """
    beside = {"heads", "selection", "hidden"}  # other heads, what they pass on to later layers, and what is large
    alone = slots_shardable(method) and method.storage != "moved"
    return alone and not any(beside & method.inputs(layer) for layer in range(num_layers))
