"""ClusterKV: recall whole clusters of keys (Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for
Recallable Compression").
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped
from typing_extensions import override

from clusterkv_jax.cache import host_store
from clusterkv_jax.cache.layers import LayerCache, StepInputs, resize
from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.kmeans import cluster
from clusterkv_jax.methods.base import Compressed, Rows, State, StorageKind
from clusterkv_jax.methods.families.recall import Index, Recall, by_kv_head, unless_over
from clusterkv_jax.methods.request import RequestShape
from clusterkv_jax.methods.schedule import Protected, Schedule, recompress_every
from clusterkv_jax.methods.steps import one_by_one
from clusterkv_jax.runtime import prng
from clusterkv_jax.runtime.errors import check_fields, is_count, is_one_of
from clusterkv_jax.runtime.host_memory import check_host_store
from clusterkv_jax.runtime.sharding import over_heads


@dataclass(frozen=True)
class ClusterKV(Recall):
    """Attend to the first `sinks` rows, to the clusters whose centroids score best with the query until B rows are
    reached, and to the generated rows that are not clustered yet.

    A prompt's rows behind the sinks are clustered by the cosines of their keys, one cluster for every
    `tokens_per_cluster`; every `interval` generated tokens among themselves into `interval_clusters`. The first
    `dense_layers` attend to everything. `per_query_head=False` chooses for all query heads of a KV head together, by
    the largest of their scores.

    `store="host"` keeps the rows of the layers that are not dense in host memory, and on the device those that the last
    `cached_steps` steps recalled; a step moves the others (see `clusterkv_jax.cache.host_store`).

    Attributes:
        budget: rows that a query reads in a step, sinks included.
        sinks: first rows, in no cluster and always read.
        tokens_per_cluster: tokens of the prompt per cluster.
        interval: generated tokens that are clustered together.
        interval_clusters: clusters that these tokens form.
        max_iterations: most steps of K-means.
        dense_layers: first layers, which attend to everything.
        per_query_head: choose for each query head; False for all query heads of a KV head together.
        store: where the rows are: "device" or "host".
        cached_steps: steps whose recalled rows stay on the device, with `store="host"`.
    """

    sinks: int = 16
    tokens_per_cluster: int = 80
    interval: int = 320
    interval_clusters: int = 4
    max_iterations: int = 20
    dense_layers: int = 2
    per_query_head: bool = True
    store: Literal["device", "host"] = "device"
    cached_steps: int = 1

    options: ClassVar[tuple[str, ...]] = ("initial_rows",)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {"sinks": 0, "tokens_per_cluster": 1, "interval": 1, "interval_clusters": 1, "max_iterations": 0}
        counts |= {"cached_steps": 0}
        check_fields(
            self,
            *(
                (name, is_count(getattr(self, name), least), f"a whole number of at least {least}")
                for name, least in counts.items()
            ),
            ("per_query_head", isinstance(self.per_query_head, bool), "True or False"),
            ("store", is_one_of(self.store, "device", "host"), '"device" or "host"'),
        )
        fit = self.interval_clusters <= self.interval
        check_fields(self, ("interval_clusters", fit, f"at most interval = {self.interval}"))

    @property
    @override
    def storage(self) -> StorageKind:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every row, on the device or in the host's memory."""
        return "host" if self.store == "host" else "index"

    @property
    @override
    def protected(self) -> Protected:
        """The sinks, which are part of the budget."""
        return Protected(sinks=self.sinks)

    @property
    @override
    def schedule(self) -> Schedule:
        """Generated tokens are clustered an interval at a time."""
        return recompress_every(self.interval)

    @override
    def check(self, lengths: np.ndarray, request: RequestShape) -> None:
        """As for all methods; a host store needs a platform that has one."""
        if self.store == "host":
            check_host_store()
        super().check(lengths, request)

    @override
    def compress(self, rows: Rows) -> Compressed:
        """The prompt, where it is to be kept, and its index."""
        result, plan = super().compress(rows), rows.plan
        if self.store == "device":
            return result
        unindexed = min(plan.reserve, self.unindexed(plan.step_tokens))
        size = {"sinks": self.sinks, "unindexed": unindexed, "steps": self.cached_steps}
        group: Any = result.cache
        return Compressed(*host_store.move_to_host(group, result.state, plan.capacity, **size))

    @override
    def selections(self, queries: int) -> int:
        """One for each query head, or one for all of a KV head."""
        return queries if self.per_query_head else 1

    @override
    def unindexed(self, tokens: int) -> int:
        """What is not clustered yet: less than an interval, and the tokens of this step."""
        return self.interval - 1 + tokens

    def clusters_of(self, lengths: Any) -> Any:
        """C0, the clusters of a prompt of so many tokens."""
        return (lengths - self.sinks) // self.tokens_per_cluster

    @override
    def build(
        self,
        prompt: LayerCache,
        rows: Rows,
        reserve: int,
        *,
        initial_rows: Int[Array, " C"] | None = None,
        **options: Any,
    ) -> Index:
        """Cluster the keys behind the sinks, with room for the clusters of `reserve` tokens.

        Centroids are means in float32 and held in the dtype of the keys: a step reads all of them.
        Clusters start from these rows of the prompt, or from random ones, of which a sequence draws those that
        it would draw alone.
        """
        key: Any = rows.key
        batch = prompt.length.shape[0]
        prompt = resize(prompt, max(prompt.capacity, self.sinks + 1))
        if initial_rows is None:
            most = max(1, self.clusters_of(prompt.capacity))
            count = jnp.maximum(1, self.clusters_of(prompt.length[:, 0]))
            draws = _draw(key, jnp.arange(prompt.capacity - self.sinks, dtype=jnp.int32))
            draws = jnp.broadcast_to(draws, (batch, draws.shape[0]))
            seeds = _lowest(draws, prompt.length[:, :1] - self.sinks, count, most)
        else:
            seeds = jnp.broadcast_to(initial_rows - self.sinks, (batch, initial_rows.shape[0]))
            count = jnp.full(batch, initial_rows.shape[0], jnp.int32)
        index = self._cluster_prompt(prompt, seeds, reserve)
        if reserve < self.interval:
            return index
        data = jax.random.key_data(key)
        copies = jnp.broadcast_to(data, (batch, *data.shape))
        return index | {"clusters": count, "key": copies, "due": index["indexed"] + self.interval}

    def _cluster_prompt(self, prompt: LayerCache, seeds: Int[Array, "B C"], reserve: int) -> Index:
        """Clusters from these rows, counted behind the sinks (-1 for none)."""
        batch, heads = prompt.length.shape
        more = self.interval_clusters * (reserve // self.interval)

        def make(prompt: LayerCache, seeds: Int[Array, "B K C"]) -> Index:
            rest = jnp.maximum(prompt.length - self.sinks, 0)
            centroids, labels, sizes = cluster(
                prompt.keys[:, :, self.sinks :], seeds, max_iterations=self.max_iterations, length=rest
            )
            ordered, starts = group_rows(labels, centroids.shape[2])
            number = jnp.arange(prompt.capacity + reserve, dtype=jnp.int32)
            order = jnp.broadcast_to(number, (*ordered.shape[:2], number.shape[0]))
            order = order.at[:, :, self.sinks : prompt.capacity].set(self.sinks + ordered)
            behind = [(0, 0), (0, 0), (0, more)]
            return {
                "centroids": jnp.pad(centroids.astype(prompt.keys.dtype), [*behind, (0, 0)]),
                "sizes": jnp.pad(sizes, behind),
                "starts": jnp.pad(self.sinks + starts[..., :-1], behind),
                "order": order,
            }

        each = jnp.broadcast_to(seeds[:, None], (batch, heads, seeds.shape[-1]))
        # What is shorter than the sinks fills them before anything can be clustered.
        return over_heads(make, prompt, each) | {"indexed": jnp.maximum(prompt.length[:, 0], self.sinks)}

    @override
    def choose(
        self, index: Index, q: Float[Array, "B K G D"], real: Bool[Array, " B"] | None = None
    ) -> Int[Array, "B K J R"]:
        """The sinks, then the best clusters by q . centroid."""
        count = index["recalled"].shape[-1]

        def best(q: Array, centroids: Array, *clusters: Array) -> Array:
            scores = index_scores(q, centroids)
            if not self.per_query_head:
                scores = jnp.max(scores, axis=2, keepdims=True)
            return select_rows(scores, *clusters, count=count, sinks=self.sinks)

        arrays = (index[name] for name in ("centroids", "sizes", "starts", "order", "budget"))
        return over_heads(best, q, *arrays, *(() if real is None else (index["recalled"], real)))

    @override
    def dim(self, index: Index) -> int:
        """That of the centroids."""
        return index["centroids"].shape[-1]

    # --- while decoding ---

    @override
    def step(self, group: Any, state: State, tokens: StepInputs) -> tuple[Float[Array, "B T H D"], Any, State]:
        """Append, look up, attend, token after token, wherever the rows are."""
        if not host_store.on_host(state):
            return super().step(group, state, tokens)
        return one_by_one(self._step_from_host, group, state, tokens)

    def _step_from_host(self, group: LayerCache, state: State, token: StepInputs):
        group, state = host_store.append(group, state, token, sinks=self.sinks)
        rows = self.choose(state, by_kv_head(token.q, group))
        rows = jnp.where((rows < group.length[:, :, None, None]) & token.real[:, :, None, None], rows, -1)
        attended, state = host_store.attend(group, state, token, rows[..., self.sinks :], sinks=self.sinks)
        return attended, group, state | {"recalled": unless_over(token.real[:, 0], rows, state)}

    @override
    def recompress(self, rows: Rows) -> Compressed:
        """Cluster intervals of the sequences that have one, until none has."""

        def more(state: tuple[Any, State]) -> Bool[Array, ""]:
            return jnp.any(rows.position >= state[1]["due"])

        def step(state: tuple[Any, State]) -> tuple[Any, State]:
            return self._cluster_interval(*state, rows.position)

        return Compressed(*jax.lax.while_loop(more, step, (rows.cache, rows.state)))

    def _cluster_interval(
        self, group: LayerCache, state: Index, position: Int[Array, " B"]
    ) -> tuple[LayerCache, Index]:
        """The first `interval` rows that are not clustered, in sequences that have so many."""
        begin = state["indexed"]
        ready = position - begin >= self.interval
        number = ordinals(self.interval, 2)
        slots = begin[:, None] + number
        draws = jax.vmap(lambda data, at: _draw(prng.wrapped(data), at))(state["key"], slots)
        most, on_host = self.interval_clusters, host_store.on_host(state)
        source, at = (state["resident_keys"], jnp.full_like(begin, self.sinks)) if on_host else (group.keys, begin)
        seeds = _lowest(draws, jnp.full_like(begin, self.interval)[:, None], jnp.full_like(begin, most), most)

        def make(source, at, index, seeds, begin, clusters, ready):
            rows = jnp.broadcast_to((at[:, None] + number)[:, None], (*seeds.shape[:2], self.interval))
            keys = jnp.take_along_axis(source, rows[..., None], axis=2)
            centroids, labels, sizes = cluster(keys, seeds, max_iterations=self.max_iterations)
            order, starts = group_rows(labels, most)
            new_index = {
                "centroids": _put(index["centroids"], centroids.astype(index["centroids"].dtype), clusters),
                "sizes": _put(index["sizes"], sizes, clusters),
                "starts": _put(index["starts"], begin[:, None, None] + starts[..., :-1], clusters),
                "order": _put(index["order"], begin[:, None, None] + order, begin),
            }

            def where_ready(new, old):
                return jnp.where(ready.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            return jax.tree.map(where_ready, new_index, index)

        each = jnp.broadcast_to(seeds[:, None], (*group.length.shape, most))
        index = {name: state[name] for name in ("centroids", "sizes", "starts", "order")}
        index_after = over_heads(make, source, at, index, each, begin, state["clusters"], ready)
        index_after["indexed"] = begin + jnp.where(ready, self.interval, 0)
        index_after["due"] = index_after["indexed"] + self.interval
        index_after["clusters"] = state["clusters"] + jnp.where(ready, most, 0)
        if not on_host:
            return group, state | index_after
        return host_store.flush(group, state | index_after, begin, ready, sinks=self.sinks, interval=self.interval)


def _draw(key: Array, numbers: Int[Array, " N"]) -> Float[Array, " N"]:
    """A random number for every row, the same in a prompt of any width."""
    return jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number)))(numbers)


def _lowest(
    draws: Float[Array, "B N"], length: Int[Array, "B 1"], count: Int[Array, " B"], most: int
) -> Int[Array, "B most"]:
    """The rows below `length` with the lowest numbers, `count` of `most`, -1 behind them."""
    real = ordinals(draws.shape[1], 2) < length
    _, rows = jax.lax.top_k(jnp.where(real, -draws, -jnp.inf), most)
    return jnp.where(ordinals(most, 2) < count[:, None], rows.astype(jnp.int32), -1)


def _put(x: Shaped[Array, "B K C ..."], part: Shaped[Array, "B K n ..."], at: Int[Array, " B"]) -> Array:
    """`x` with `part` from entry at[b] on, in every sequence."""

    def one_row(x: Array, part: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice(x, part, (jnp.int32(0), at, *[jnp.int32(0)] * (x.ndim - 2)))

    return jax.vmap(one_row)(x, part, at)
