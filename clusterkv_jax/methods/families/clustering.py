"""What the clustering methods share: when to cluster, the slots that takes, and clustering in place while decoding."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from clusterkv_jax import soft_matching
from clusterkv_jax.budget import MOST_ROWS, Budget
from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.kernels.gpu import converts
from clusterkv_jax.kernels.quantised import Quantised, kind
from clusterkv_jax.methods.base import Compressed, Input, Rows, State
from clusterkv_jax.methods.families.merging import Merging
from clusterkv_jax.methods.request import RequestShape, all_heads
from clusterkv_jax.methods.schedule import Protected, Schedule, recompress_every
from clusterkv_jax.runtime.control_flow import head_by_head
from clusterkv_jax.runtime.dispatch import traits
from clusterkv_jax.runtime.errors import check_fields, is_count, is_one_of
from clusterkv_jax.runtime.sharding import over_heads
from clusterkv_jax.soft_matching import Edges


@dataclass(frozen=True)
class Clustering(Merging):
    """Chunked soft matching down to a budget, after the prompt and every `interval` generated tokens.

    The dataclasses below it have the field `interval`, and say with `ratios` and `merge_of` how many edges a round
    merges, with `edges` what an edge is worth, and with `slack` how far above its budget a prompt must be.
    """

    budget: Budget
    sinks: int = 16
    recent: int = 64
    chunk: int = 256

    if TYPE_CHECKING:  # fields or constants of the methods, each in its own place
        interval: ClassVar[int]
        merge_of: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            ("budget", isinstance(self.budget, Budget), "a Budget"),
            ("sinks", is_count(self.sinks), "a whole number of at least 0"),
            ("recent", is_count(self.recent), "a whole number of at least 0"),
            ("chunk", is_count(self.chunk, 2) and self.chunk % 2 == 0, "an even number of rows, at least 2"),
            ("interval", is_count(self.interval, 1), "a whole number of at least 1"),
            ("merge_of", is_one_of(self.merge_of, "edges", "A", "middle"), '"edges" (or "A") or "middle"'),
        )

    @property
    @abstractmethod
    def ratios(self) -> tuple[float, ...]:
        """Share of the middle (or of A) merged in each round; the last serves all later rounds."""

    @property
    def edges(self) -> Edges | None:
        """What edges are scored by; None is the cosine of keys."""
        return None

    @property
    @override
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks, recent=self.recent)

    @property
    @override
    def schedule(self) -> Schedule:
        return recompress_every(self.interval)

    @override
    def budget_rows(self, lengths: np.ndarray, layer: int, request: RequestShape) -> np.ndarray:
        """B of each prompt; without any merging (all ratios 0) more than there can be."""
        if not any(self.ratios):
            return all_heads(np.full(len(lengths), MOST_ROWS, np.int64), request.num_kv_heads)
        return super().budget_rows(lengths, layer, request)

    @override
    def inputs(self, layer: int) -> frozenset[Input]:
        return frozenset({"layers"})

    @override
    def init_state(self, rows: Rows) -> State:
        """The rounds done in the life of each request: Chelsea's ratio decays with them."""
        return {"rounds": rows.state.get("rounds", jnp.zeros(rows.budget.shape, jnp.int32))}

    @override
    def compress(self, rows: Rows) -> Compressed:
        """Cluster the prompts that exceed their budget."""
        prompt: Any = rows.cache
        target = jnp.where(rows.position >= rows.budget + self.schedule.slack, rows.budget, rows.position)
        slots = min(rows.plan.capacity, prompt.capacity)
        expected = self._expected(rows)
        options = self._options(prompt) | {"expected": expected, "enough": bool(expected) and rows.plan.exact}

        def cluster(prompt, target, rounds, squares):
            given = {"slots": slots, "squares": squares}
            return soft_matching.cluster_in_place(prompt, target, rounds, **options, **given)

        group, left, rounds = over_heads(cluster, prompt, target, rows.state["rounds"], rows.squares)
        return Compressed(group, {"rounds": rounds}, slots=left)

    def _expected(self, rows: Rows) -> tuple[int, ...]:
        """The rows before each round of the longest prompt. Where the host drives loops, the rounds run without asking
        the device whether it is done: it would idle until the answer is back.
        """
        if not traits().host_driven:
            return ()
        longest, plan = rows.cache.degree.shape[2], rows.plan
        # A prompt that exceeds its budget by less than the slack stays as it is.
        largest = longest, plan.most_rows + self.schedule.slack
        apart = {"sinks": self.sinks, "recent": self.recent, "chunk": self.chunk}
        schedule = self._merge_schedule(longest)
        return soft_matching.rows_by_round((longest, plan.fewest_rows), largest, schedule, **apart)

    def _merge_schedule(self, rows: int) -> np.ndarray:
        return soft_matching.merge_schedule(rows, self.chunk, self.ratios, self.merge_of)

    def _options(self, group: LayerCache) -> dict[str, Any]:
        apart = {"sinks": self.sinks, "recent": self.recent, "chunk": self.chunk}
        return apart | {"schedule": self._merge_schedule(group.capacity), "edges": self.edges}

    @override
    def recompress(self, rows: Rows) -> Compressed:
        """The same in place. The GPU kernels merge all heads where they lie; elsewhere, and of codes that a GPU cannot
        convert, copies are made of rows, so one head of one sequence at a time.
        """

        def cluster(tree):
            group, target, rounds = tree
            group, rounds = soft_matching.cluster(group, target, rounds, **self._options(group))
            return group, target, rounds

        cache: Any = rows.cache
        keys, tree = cache.keys, (cache, rows.budget, rows.state["rounds"])
        if traits().merges_in_place and (not isinstance(keys, Quantised) or converts(kind(keys))):
            merge = partial(soft_matching.cluster_in_place, **self._options(cache))
            group, left, rounds = over_heads(merge, *tree)
            return Compressed(group, {"rounds": rounds}, slots=left)
        group, _, rounds = over_heads(lambda *tree: head_by_head(cluster, tree), *tree)
        return Compressed(group, {"rounds": rounds})
