"""What happens only where it is due: to a tree as a whole, or to its parts one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from clusterkv_jax.runtime.dispatch import platform


def cond_in_place(due: Bool[Array, ""], function: Callable[[Any], Any], tree: Any) -> Any:
    """`function(tree)` if due, else `tree`.

    On a GPU a loop of one round or none, whose state stays where it lies: there XLA copies all that goes through a
    conditional, in the branch that changes nothing too, and that at every step.
    """
    if platform() != "gpu":
        return jax.lax.cond(due, function, lambda tree: tree, tree)
    return _at_most_once(due, function, tree)[1]


def at_most(most: int, step: Callable[[Any], Any], unfinished: Callable[[Any], Bool[Array, ""]], tree: Any) -> Any:
    """`tree = step(tree)` while `unfinished(tree)`, `most` times at most; a step leaves a finished tree as it is.

    The host of a GPU would look at each step whether another one follows, which takes longer than steps that leave the
    tree: there all are taken.
    """
    if platform() == "gpu":
        return jax.lax.fori_loop(0, most, lambda _, tree: step(tree), tree)

    def more(state):
        return (state[0] < most) & unfinished(state[1])

    def one(state):
        return state[0] + 1, step(state[1])

    return jax.lax.while_loop(more, one, (jnp.int32(0), tree))[1]


def while_running(running: Callable[[Any], Bool[Array, ""]], step: Callable[[Any], Any], tree: Any) -> Any:
    """`tree = step(tree)` while `running(tree)`, which a step asks: the host of a GPU waits for no launch beside it."""

    def one(state: tuple[Array, Any]) -> tuple[Array, Any]:
        after = step(state[1])
        return running(after), after

    return jax.lax.while_loop(lambda state: state[0], one, (running(tree), tree))[1]


def while_with_maintenance(
    running: Callable[[Any], Bool[Array, ""]],
    step: Callable[[Any], Any],
    room: Callable[[Any], Any],
    maintain: Callable[[Any], Any],
    tree: Any,
) -> Any:
    """`tree = step(tree)` while `running(tree)`, and `tree = maintain(tree)` after each step that leaves it no `room`.

    `room` gives a whole number, of which a step takes one at most, or None, statically, where it never ends. The host
    of a GPU waits for a number of each step, whether another one follows at once: the steps between two of these are a
    loop of their own, so that there is only one. They count down the room that they begin with, which is the least of
    all layers and would take time at each step.
    """
    if room(tree) is None:
        return while_running(running, step, tree)

    def first(state):
        return state[0]

    def counted(state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        _, left, tree = state
        after = step(tree)
        left = jnp.where(running(after), left - 1, 0)
        return left > 0, left, after

    def until_late(state: tuple[Array, Any]) -> tuple[Array, Any]:
        *_, after = jax.lax.while_loop(first, counted, (jnp.ones((), bool), room(state[1]), state[1]))
        after = cond_in_place(room(after) <= 0, maintain, after)
        return running(after), after

    return jax.lax.while_loop(first, until_late, (running(tree), tree))[1]


def sequenced(
    earlier: Bool[Array, ""], due: Bool[Array, ""], function: Callable[[Any], Any], tree: Any
) -> tuple[Bool[Array, ""], Any]:
    """`function(tree)`, which leaves the tree as it is unless due, and what the next part takes as its `earlier`.

    On a GPU it begins when the part before has ended: what XLA lets run at the same time shares no memory. `earlier` is
    False, of the first part and after each, which the compiler does not know. Elsewhere XLA orders parts by itself.
    """
    if platform() != "gpu":
        return earlier, function(tree)
    return _at_most_once(due & ~earlier, function, tree)


def head_by_head(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to one head of one sequence after the other, in place: its temporaries are those of a head.

    The tree holds arrays [B, K, ...], of which the function sees [1, 1, ...], and [B], of which it sees [1], the same
    for each head of a row. It returns a tree of the same kind.
    """
    batch, heads = next(x.shape[:2] for x in jax.tree.leaves(tree) if x.ndim > 1)

    def body(i, now):
        row, head = i // heads, i % heads

        def start(x: Array) -> tuple[Array, ...]:
            return (row, head, *[jnp.int32(0)] * (x.ndim - 2))[: x.ndim]

        def cut(original: Array, x: Array) -> Array:
            # Every head of a row starts with the row's own number, not with what the head before it made of that.
            x = original if x.ndim == 1 else x
            return jax.lax.dynamic_slice(x, start(x), (1, 1, *x.shape[2:])[: x.ndim])

        def put(x: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice(x, part, start(x))

        return jax.tree.map(put, now, function(jax.tree.map(cut, tree, now)))

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(batch * heads), body, tree)


def _at_most_once(due: Bool[Array, ""], function: Callable[[Any], Any], tree: Any) -> tuple[Bool[Array, ""], Any]:
    """False, and the tree."""

    def once(state):
        return (jnp.zeros_like(state[0]), function(state[1]))

    return jax.lax.while_loop(lambda state: state[0], once, (due, tree))
