"""The protocol of a compression method, and what all methods share.

A method is a frozen dataclass, budget first, hashable and so static under jit. It answers these questions:

    plan       how many slots does a layer get?          host, numpy, once per prompt bucket
    compress   what is kept of a layer's prompt?         jit, once per layer, right after that layer's attention
    step       how do new tokens enter and attend?       jit, once per layer and step
    due        must the cache be compressed again?       jit, a scalar for all layers, after every step
    recompress ... and how?                              jit, under one condition, when due

A layer is one group of KV heads, or several where heads have different budgets. `compress` and `step` take a layer
apart into its groups; a method says with `compress_group`, `step_group` and `recompress_group` what happens to one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from clusterkv_jax import pages
from clusterkv_jax.attention import attend_cache, attend_new, combine, join_heads, query_heads
from clusterkv_jax.budget import MOST_ROWS, Base, Budget, rows_for, share_table
from clusterkv_jax.cache import (
    Group,
    HeadGroups,
    KVCache,
    Layer,
    LayerCache,
    NewTokens,
    PagedHeads,
    State,
    append,
    from_tokens,
    group_heads,
    groups,
    resize,
    select_heads,
)
from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.methods.request import LayerPlan, Request

Held = TypeVar("Held", LayerCache, PagedHeads)


@dataclass(frozen=True)
class Method:
    """Base of all methods: keeps every token, compresses nothing.

    A method overrides what it does differently. `default_base` is what the paper takes its ratio of, `looks_ahead` says
    whether `NewTokens.ahead` is wanted.
    """

    default_base: ClassVar[Base] = "prompt"
    looks_ahead: ClassVar[bool] = False

    @property
    def fewest_rows(self) -> int:
        """The fewest rows that a budget must leave."""
        return 0

    @property
    def uses_host(self) -> bool:
        """Whether rows may be in the host's memory."""
        return False

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """B, the rows each prompt may keep for this head, [lengths]; MOST_ROWS where nothing is ever compressed."""
        del request, layer, head
        return np.full(np.shape(lengths), MOST_ROWS, np.int64)

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """Raise ValueError, naming the numbers, if a prompt of one of these lengths has an impossible budget."""

    def head_groups(self, layer: int, request: Request) -> tuple[tuple[int, ...], ...]:
        """KV heads of this layer that have equal budgets stand together."""
        del layer
        return (tuple(range(request.num_kv_heads)),)

    def plan(self, layer: int, request: Request) -> LayerPlan:
        """Slots of layer `layer`: the most rows that a head can come to hold."""
        heads = self.head_groups(layer, request)
        lengths = np.asarray(request.lengths)
        rows = [np.maximum(self.rows(lengths, request, layer, group[0]), self.fewest_rows) for group in heads]
        slots = (np.minimum(self.slots(lengths, b, request), lengths + request.reserve) for b in rows)
        return LayerPlan(
            heads,
            tuple(aligned(int(np.max(most))) for most in slots),
            tuple(bool(np.min(b) >= MOST_ROWS) for b in rows),
            self.makes_scores(layer),
        )

    def rounds(self, layer: int, request: Request) -> int | None:
        """Rounds that compressing exactly these prompts takes, for a program that is not to ask the device; None for
        methods without rounds, and where asking is cheap.
        """
        del layer, request
        return None

    def makes_scores(self, layer: int) -> bool:
        """Whether this layer decides for itself; otherwise it does what the last one did that decided."""
        del layer
        return True

    def slots(self, lengths: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """The most rows a head can come to hold, by prompt length; more than there are tokens means all."""
        del rows
        return lengths + request.reserve

    def compress(
        self,
        queries: Float[Array, "B H N D"] | None,
        keys: Float[Array, "B K N D"],
        values: Float[Array, "B K N D"],
        lengths: Int[Array, " B"],
        rows: Int[Array, "B groups"],
        plan: LayerPlan,
        key: Array | None,
        handed: Any = None,
    ) -> tuple[Layer, tuple[State, ...], Any]:
        """A layer's cache after its prompt.

        Args:
            queries, keys, values, lengths: of the prompt, padded.
            rows: B of each prompt and group of heads.
            plan: static.
            key: PRNG key of this layer.
            handed: what the previous layer's `compress` returned last; None unless the plan says not to score.

        Returns:
            the layer, the state of each group of heads, and what the next layer may use.
        """
        prompt = from_tokens(keys, values, lengths)
        made, states, hand = [], [], []
        for i, (heads, capacity, keep_all) in enumerate(zip(plan.heads, plan.capacities, plan.keep_all, strict=True)):
            group = prompt if len(plan.heads) == 1 else select_heads(prompt, heads)
            state = over = None
            if not keep_all:
                asked = None if queries is None else query_heads(queries, heads, keys.shape[1], axis=1)
                given = None if handed is None else handed[i]
                group, state, over = self.compress_group(group, asked, rows[:, i], capacity, plan, key, given)
            made.append(group if isinstance(group, PagedHeads) else resize(group, capacity))
            states.append(state)
            hand.append(over)
        layer = made[0] if len(made) == 1 else HeadGroups(tuple(made), plan.heads)
        return layer, tuple(states), None if all(over is None for over in hand) else tuple(hand)

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[LayerCache, State, Any]:
        """What is kept of one group of heads, in at least as many slots as it holds rows."""
        raise NotImplementedError

    def step(
        self, layer: Layer, state: tuple[State, ...], new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], Layer, tuple[State, ...]]:
        """New tokens enter the layer and attend to it; heads without a state append and attend to all they hold."""
        parts = []
        for group, heads, kept in zip(groups(layer), group_heads(layer), state, strict=True):
            mine = _of_heads(new, heads) if isinstance(layer, HeadGroups) else new
            enter = append_and_attend if kept is None else self.step_group
            parts.append(enter(group, kept, mine))
        attended, made, states = zip(*parts, strict=True)
        out = join_heads(attended, layer.heads) if isinstance(layer, HeadGroups) else attended[0]
        return out, with_groups(layer, made), states

    def step_group(
        self, group: LayerCache, state: State, new: NewTokens
    ) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
        """Tokens enter one group of heads that has a state."""
        return append_and_attend(group, state, new)

    def due(self, cache: KVCache) -> Bool[Array, ""] | None:
        """Scalar: must the cache be compressed now? None, statically, for methods that never do it while decoding."""
        del cache
        return None

    def recompress(self, cache: KVCache) -> KVCache:
        """Bring every batch row that is due back to its budget; the others stay as they are, bit for bit."""
        return cache


class Budgeted(Method):
    """What methods with a budget share: its arithmetic, its checks, and compressing again while decoding.

    The dataclasses below it have a field `budget`.
    """

    budget: Budget

    @property
    def always_kept(self) -> dict[str, int]:
        """Rows that are never dropped or merged, by the names of their fields."""
        raise NotImplementedError

    @property
    def fewest_rows(self) -> int:
        """One row more than those that are always kept."""
        return sum(self.always_kept.values()) + 1

    @property
    def prefill_slack(self) -> int:
        """A prompt of n tokens is compressed if n >= B + prefill_slack."""
        return 0

    @property
    def decode_rows(self) -> int | None:
        """While decoding the cache is brought back to B when it holds B + decode_rows rows; None: never."""
        return None

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """B of each prompt (see `Budget`)."""
        return rows_for(
            self.budget,
            lengths,
            request.max_new_tokens,
            self.default_base,
            bytes_per_row=request.row_bytes * request.num_layers * request.num_kv_heads,
            layer=layer,
            head=head,
            num_layers=request.num_layers,
            num_heads=request.num_kv_heads,
        )

    def head_groups(self, layer: int, request: Request) -> tuple[tuple[int, ...], ...]:
        """KV heads by equal shares, the largest first."""
        shares = share_table(self.budget, request.num_layers, request.num_kv_heads)[layer]
        return tuple(
            tuple(np.flatnonzero(shares == share).tolist()) for share in sorted(set(shares.tolist()), reverse=True)
        )

    def check(self, lengths: Iterable[int], request: Request) -> None:
        """Raise ValueError if a prompt that is or will be compressed has no room for more than what is always kept."""
        lengths = np.asarray(tuple(lengths))
        for layer in range(request.num_layers):
            for heads in self.head_groups(layer, request):
                for n, b in zip(lengths, self.rows(lengths, request, layer, heads[0]), strict=True):
                    again = self.decode_rows is not None and n + request.reserve >= b + self.decode_rows
                    if (b < n or again) and b < self.fewest_rows:
                        names, counts = " + ".join(self.always_kept), " + ".join(map(str, self.always_kept.values()))
                        raise ValueError(
                            f"{type(self).__name__}: a prompt of {n} tokens has a budget of {b} rows, "
                            f"which must be more than {names} = {counts}."
                        )

    def kept(self, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Rows that the compression of each prompt leaves."""
        return np.where((lengths > rows) & (lengths >= rows + self.prefill_slack), rows, lengths)

    def slots(self, lengths: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """What the prompt leaves and what may be appended to it."""
        return self.slots_after(self.kept(lengths, rows), rows, request)

    def slots_after(self, kept: np.ndarray, rows: np.ndarray, request: Request) -> np.ndarray:
        """The most rows a head that starts with `kept` of them can come to hold."""
        if request.reserve == 0 or self.decode_rows is None:
            return kept + request.reserve
        # A step begins with at most B + decode_rows - 1 rows, or with what the prompt left, and appends step_tokens.
        return np.maximum(kept, rows + self.decode_rows - 1) + request.step_tokens

    def start(
        self,
        group: LayerCache,
        rows: Int[Array, " B"],
        queries: Float[Array, "B H N D"] | None,
        plan: LayerPlan,
        key: Any,
    ) -> State:
        """State of a group of heads that this method takes over after the prompt, whoever compressed it."""
        del group, queries, plan, key
        return None if self.decode_rows is None else {"budget": rows}

    def hold(self, group: LayerCache, capacity: int) -> Group:
        """A group of heads that this method takes over after the prompt, as it holds its own, in `capacity` slots."""
        del capacity
        return group

    def held(self, group: LayerCache) -> Int[Array, " B"]:
        """Rows per head, as they count against the budget; most methods keep equally many of every head of a group."""
        return group.length[:, 0]

    def due(self, cache: KVCache) -> Bool[Array, ""] | None:
        """True when a batch row holds `decode_rows` rows more than its budget in some group of heads."""
        if self.decode_rows is None:
            return None
        full = [
            jnp.any(self.held(group) >= kept["budget"] + self.decode_rows)
            for layer, state in zip(cache.layers, cache.state, strict=True)
            for group, kept in zip(groups(layer), state, strict=True)
            if kept is not None
        ]
        return jnp.any(jnp.stack(full)) if full else None

    def recompress(self, cache: KVCache) -> KVCache:
        """Compress the batch rows that are due, layer by layer; what a layer hands on goes to the next one."""
        layers, states, handed = [], [], None
        for number, (layer, state) in enumerate(zip(cache.layers, cache.state, strict=True)):
            given = None if self.makes_scores(number) else handed
            made, over = self._recompress_layer(layer, state, cache.position, given)
            handed = over if given is None else given
            layers.append(with_groups(layer, [group for group, _ in made]))
            states.append(tuple(kept for _, kept in made))
        return replace(cache, layers=tuple(layers), state=tuple(states))

    def _recompress_layer(self, layer: Layer, state: tuple[State, ...], position: Array, handed: Any):
        made, hand = [], []
        assert self.decode_rows is not None
        for i, (group, kept) in enumerate(zip(groups(layer), state, strict=True)):
            over = None
            if kept is not None:
                held = self.held(group)
                target = jnp.where(held >= kept["budget"] + self.decode_rows, kept["budget"], held)
                given = None if handed is None else handed[i]
                group, kept, over = self.recompress_group(group, kept, target, position, given)
            made.append((group, kept))
            hand.append(over)
        return made, tuple(hand)

    def recompress_group(
        self,
        group: LayerCache,
        state: Any,
        target: Int[Array, " B"],
        position: Int[Array, " B"],
        handed: Any,
    ) -> tuple[LayerCache, State, Any]:
        """Bring a group of heads to `target` rows, in the same slots."""
        raise NotImplementedError


def append_and_attend(group: Held, state: State, new: NewTokens) -> tuple[Float[Array, "B T H D"], Held, State]:
    """The step of most methods: the tokens stand behind the rows there are, and attend to all of them."""
    longer = append_new(group, new)
    if new.q.shape[1] == 1:
        return attend_cache(longer, new.q)[0], longer, state
    return combine(attend_cache(group, new.q), attend_new(new.q, new.k, new.v, new.real)), longer, state


def append_new(group: Held, new: NewTokens) -> Held:
    """The new tokens behind the rows there are."""
    tokens = jnp.swapaxes(new.k, 1, 2), jnp.swapaxes(new.v, 1, 2), new.positions, new.real
    return pages.append(group, *tokens) if isinstance(group, PagedHeads) else append(group, *tokens)


def one_by_one(
    step: Callable[[LayerCache, State, NewTokens], tuple[Array, LayerCache, State]],
    group: LayerCache,
    state: State,
    new: NewTokens,
) -> tuple[Float[Array, "B T H D"], LayerCache, State]:
    """T tokens through a step that takes one: for methods that drop rows at every token."""
    if new.q.shape[1] == 1:
        return step(group, state, new)

    def body(carry, token):
        group, state = carry
        attended, group, state = step(group, state, token)
        return (group, state), attended[:, 0]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], new)
    (group, state), attended = jax.lax.scan(body, (group, state), tokens)
    return jnp.moveaxis(attended, 0, 1), group, state


def aligned(slots: int) -> int:
    """`slots`, on a TPU rounded up to its tile of 16 rows: of another size, XLA would lay the cache out by batch rows
    and copy all of it into and out of the decode loop.
    """
    return -(-slots // 16) * 16 if platform() == "tpu" else slots


def _of_heads(new: NewTokens, heads: tuple[int, ...]) -> NewTokens:
    index = jnp.asarray(heads)
    q, ahead = (None if x is None else query_heads(x, heads, new.k.shape[2], axis=2) for x in (new.q, new.ahead))
    return replace(new, q=q, ahead=ahead, k=new.k[:, :, index], v=new.v[:, :, index])


def with_groups(layer: Layer, made: Sequence[Any]) -> Layer:
    """The layer with other groups in the place of its own."""
    return replace(layer, groups=tuple(made)) if isinstance(layer, HeadGroups) else made[0]
