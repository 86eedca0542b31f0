"""Counts for Prometheus, under the names that dashboards of inference servers know."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from clusterkv_jax.engine import EngineStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAUGES = {
    "num_requests_running": "Requests in slots.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage_perc": "Share of the slots that are in use, from 0 to 1.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Tokens of prompts that were looked up among the contexts.",
    "prefix_cache_hits": "Tokens of prompts that were found there.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request to its first token.",
    "inter_token_latency_seconds": "Between two tokens of an answer, on average over the answer.",
    "e2e_request_latency_seconds": "From a request to the end of its answer.",
}


@dataclass(frozen=True, eq=False)
class Metrics:
    """Counters, gauges and histograms by their names, and the registry that shows them."""

    registry: CollectorRegistry
    by_name: dict[str, Any] = field(repr=False)


def make_metrics() -> Metrics:
    """All of them, at zero."""
    registry = CollectorRegistry()
    names = {name: f"clusterkv_{name}" for name in (*_GAUGES, *_COUNTERS, *_HISTOGRAMS, "request_success")}
    made: dict[str, Any] = {name: Gauge(names[name], text, registry=registry) for name, text in _GAUGES.items()}
    made |= {name: Counter(names[name], text, registry=registry) for name, text in _COUNTERS.items()}
    made |= {
        name: Histogram(names[name], text, registry=registry, buckets=_SECONDS) for name, text in _HISTOGRAMS.items()
    }
    ended = Counter(names["request_success"], "Answers by their end.", ["finished_reason"], registry=registry)
    return Metrics(registry, made | {"request_success": ended})


def shown(metrics: Metrics, stats: "EngineStats") -> bytes:
    """The text that Prometheus reads."""
    values = dict(zip(_GAUGES, (stats.active, stats.waiting, stats.active / stats.slots), strict=True))
    for name, value in values.items():
        metrics.by_name[name].set(value)
    return generate_latest(metrics.registry)


def count(metrics: Metrics, **more: float) -> None:
    """Add to counters."""
    for name, value in more.items():
        metrics.by_name[name].inc(value)


def observe(metrics: Metrics, **seconds: float) -> None:
    """Add to histograms."""
    for name, value in seconds.items():
        metrics.by_name[name].observe(value)


def ends(reasons: Iterator[str], metrics: Metrics) -> None:
    """Count answers by why they ended."""
    for reason in reasons:
        metrics.by_name["request_success"].labels(reason).inc()
