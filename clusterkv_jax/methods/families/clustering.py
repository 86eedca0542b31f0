"""What the clustering methods share: when to cluster, the slots that takes, and clustering in place while decoding."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from clusterkv_jax import soft_matching
from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.cache import LayerCache, State, head_by_head
from clusterkv_jax.errors import check_fields, is_count
from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.methods.base import Budgeted, LayerPlan, Request
from clusterkv_jax.sharding import over_heads
from clusterkv_jax.soft_matching import Edges


class Clustering(Budgeted):
    """Chunked soft matching down to a budget, after the prompt and every `interval` generated tokens.

    The dataclasses below it have these fields, each in its own order, and say with `ratios` and `merge_of` how many
    edges a round merges, and with `prefill_slack` how far above its budget a prompt must be to be clustered at all.
    """

    budget: Budget
    sinks: int
    recent: int
    chunk: int
    merge_of: str
    interval: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the middle (or of A) merged in each round; the last serves all later rounds."""
        raise NotImplementedError

    @property
    def edges(self) -> Edges | None:
        """What edges are scored by; None is the cosine of keys."""
        return None

    @property
    def always_kept(self) -> dict[str, int]:
        """Sinks and recent rows are never merged."""
        return {"sinks": self.sinks, "recent": self.recent}

    @property
    def decode_rows(self) -> int:
        """Clustered again every `interval` tokens."""
        return self.interval

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
            ("recent", is_count(self.recent), "a whole number of at least 0"),
            ("chunk", is_count(self.chunk, 2) and self.chunk % 2 == 0, "an even number of rows, at least 2"),
            ("interval", is_count(self.interval, 1), "a whole number of at least 1"),
            ("merge_of", self.merge_of in ("A", "middle"), '"A" or "middle"'),
        )

    def rows(self, lengths: np.ndarray, request: Request, layer: int = 0, head: int = 0) -> np.ndarray:
        """B of each prompt (see `Budget`); without any merging (all ratios 0) more than there can be."""
        if not any(self.ratios):
            return np.full(np.shape(lengths), MOST_ROWS, np.int64)
        return super().rows(lengths, request, layer, head)

    def rounds(self, layer: int, request: Request) -> int | None:
        """On a GPU those of the slowest head; elsewhere one program serves any number of rounds."""
        if platform() != "gpu":
            return None
        lengths, counts = np.asarray(request.lengths), []
        schedule = self._schedule(request.longest)
        for heads in self.head_groups(layer, request):
            rows = self.rows(lengths, request, layer, heads[0])
            target = np.where(lengths >= rows + self.prefill_slack, rows, lengths)
            apart = {"sinks": self.sinks, "recent": self.recent, "chunk": self.chunk}
            counts.append(soft_matching.count_rounds(lengths, target, schedule, **apart))
        return max(counts)

    def _schedule(self, rows: int) -> np.ndarray:
        return soft_matching.merge_schedule(rows, self.chunk, self.ratios, self.merge_of)

    def start(self, group: LayerCache, rows: Array, queries: Array | None, plan: LayerPlan, key: Any) -> State:
        """The budget of each batch row, and the rounds done in its life."""
        del group, queries, plan, key
        return {"budget": rows, "rounds": jnp.zeros(rows.shape, jnp.int32)}

    def compress_group(
        self,
        prompt: LayerCache,
        queries: Float[Array, "B H N D"] | None,
        rows: Int[Array, " B"],
        capacity: int,
        plan: LayerPlan,
        key: Array | None,
        handed: Any,
    ) -> tuple[LayerCache, State, None]:
        """Cluster the prompts that exceed their budget."""
        del handed
        state: Any = self.start(prompt, rows, queries, plan, key)
        lengths = prompt.length[:, 0]
        target = jnp.where(lengths >= rows + self.prefill_slack, rows, lengths)
        cluster = partial(self._cluster, slots=min(capacity, prompt.capacity), known_rounds=plan.rounds)
        group, rounds = over_heads(cluster, prompt, target, state["rounds"])
        return group, state | {"rounds": rounds}, None

    def _cluster(
        self,
        group: LayerCache,
        target: Int[Array, " B"],
        rounds: Int[Array, " B"],
        slots: int | None = None,
        known_rounds: int | None = None,
    ):
        return soft_matching.cluster(
            group,
            target,
            rounds,
            self._schedule(group.capacity),
            sinks=self.sinks,
            recent=self.recent,
            chunk=self.chunk,
            slots=slots,
            edges=self.edges,
            known_rounds=known_rounds,
        )

    def recompress_group(
        self, group: LayerCache, state: Any, target: Int[Array, " B"], position: Array, handed: Any
    ) -> tuple[LayerCache, State, None]:
        """The same in place. The GPU kernels merge all heads where they lie; elsewhere float32 copies are made, so one
        head of one batch row at a time.
        """
        del position, handed

        def cluster(tree):
            group, target, rounds = tree
            group, rounds = self._cluster(group, target, rounds)
            return group, target, rounds

        in_place = cluster if platform() == "gpu" else partial(head_by_head, cluster)
        group, _, rounds = over_heads(lambda *tree: in_place(tree), group, target, state["rounds"])
        return group, state | {"rounds": rounds}, None
