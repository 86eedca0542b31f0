"""Batches that process 0 comes upon as it goes, such as a harness's: told to all processes, round by round.

rounds/R/order        a model to load (an object), a number of batches to answer, or null: there is no more to do
rounds/R/batches/I    a batch: whether the method answers it or the full cache, and its jobs
rounds/R/work ...     as `replicas.scatter` tells them
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from clusterkv_jax.evaluation import replicas
from clusterkv_jax.evaluation.batching import EvaluationBatch, Job, MethodEntry
from clusterkv_jax.evaluation.replicas import Post, ReplicaGroup
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.methods import Full


@dataclass(frozen=True)
class _Round:
    """A post with names of its own."""

    post: Post
    number: int

    def _name(self, name: str) -> str:
        return f"rounds/{self.number}/{name}"

    def tell(self, name: str, text: str) -> None:
        self.post.tell(self._name(name), text)

    def hear(self, name: str) -> str:
        return self.post.hear(self._name(name))

    def take(self, folder: str) -> list[tuple[str, str]]:
        return self.post.take(self._name(folder))


class WorkQueue:
    """What process 0 orders; where it is alone (`post` is None) nobody need hear it."""

    def __init__(self, post: Post | None) -> None:
        self._post, self._numbers = post, count()

    def load(self, about: dict[str, Any]) -> None:
        """A model by its arguments, which all following batches are for."""
        self._order(about)

    def answers(
        self, team: ReplicaGroup, batches: Sequence[EvaluationBatch]
    ) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
        """The answers of all replicas as they come, each with its batch."""
        texts = [msgspec.json.encode((batch.compressed, batch.jobs)).decode() for batch in batches]
        yield from replicas.scatter(team, batches, self._order(len(batches), texts))(batches)

    def end(self) -> None:
        """There is no more to do."""
        self._order(None)

    def _order(self, order: Any, batches: Sequence[str] = ()) -> _Round | None:
        if self._post is None:
            return None
        here = _Round(self._post, next(self._numbers))
        for number, text in enumerate(batches):
            here.tell(f"batches/{number}", text)
        here.tell("order", json.dumps(order))
        return here


def serve(
    post: Post,
    load: Callable[[dict[str, Any]], tuple[MethodEntry, Callable[[Sequence[EvaluationBatch]], ReplicaGroup]]],
) -> None:
    """What every other process does, until there is no more to do; `load` says who answers such batches, and by which
    method.
    """
    entry, team = None, None
    for number in count():
        here = _Round(post, number)
        match json.loads(here.hear("order")):
            case None:
                return
            case dict(about):
                entry, team = load(about)
            case int(size) if entry is not None and team is not None:
                batches = [_batch(here.hear(f"batches/{i}"), entry) for i in range(size)]
                replicas.serve(team(batches), batches, here)


def _batch(text: str, entry: MethodEntry) -> EvaluationBatch:
    compressed, jobs = msgspec.json.decode(text, type=tuple[bool, tuple[Job, ...]])
    return EvaluationBatch(entry, entry.method if compressed else Full(), jobs)
