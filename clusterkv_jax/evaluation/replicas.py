"""Replicas of a model over all devices, and what they answer: a thread of its process for each.

The `data` axis of a mesh counts replicas; each lies over the other axes. A replica has devices of one process, or
all devices of several, which then read the same batches in lockstep. Its leader, the first of them, hands the answers
over; the others compute and say nothing.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clusterkv_jax.checkpoints.loading import Model, load
from clusterkv_jax.evaluation.batching import AnswerKey, EvaluationBatch, shares
from clusterkv_jax.evaluation.responses import Answers, Response, responder
from clusterkv_jax.runtime.sharding import fitted_mesh, mesh_sizes, named_mesh

# Between two looks at what other processes have sent.
POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


@runtime_checkable
class Post(Protocol):
    """What carries texts between processes: `cli.process_group.ProcessGroup`."""

    def tell(self, name: str, text: str) -> None:
        """Leave a text under a name."""

    def hear(self, name: str) -> str:
        """The text under a name, as soon as it is there."""
        ...

    def take(self, folder: str) -> list[tuple[str, str]]:
        """All texts under folder/, with the rests of their names; they are gone then."""
        ...


@dataclass(frozen=True)
class Replica:
    """Devices that hold the model once, in the shape of `mesh`; a single device has none.

    Attributes:
        number: of the replica, from 0.
        devices: neighbours, in the order of their processes.
        mesh: over them.
    """

    number: int
    devices: tuple[Any, ...]
    mesh: Mesh | None

    @property
    def processes(self) -> list[int]:
        """Whose devices these are; the first one leads."""
        return sorted({device.process_index for device in self.devices})

    def place(self) -> AbstractContextManager[Any]:
        """Where arrays are made that lie on no mesh."""
        if self.mesh is not None or self.devices[0] == jax.local_devices()[0]:
            return nullcontext()
        return jax.default_device(self.devices[0])

    def load(self, name: str, dtype: Any = None, weights: str | None = None) -> Model:
        """The model on these devices."""
        with self.place():
            return load(name, mesh=self.mesh, dtype=dtype, weights=weights)

    def copy(self, model: Model) -> Model:
        """A model that lies on other devices of this process, on these: it is read from the disk once."""

        mesh = None if self.mesh is None else fitted_mesh(self.mesh, model.config.num_kv_heads)

        def there(x: jax.Array) -> jax.Array:
            spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
            return jax.device_put(x, self.devices[0] if mesh is None else NamedSharding(mesh, spec))

        # Threads must not share a tokenizer: it refuses a call while it answers another.
        tokenizer = deepcopy(model.tokenizer)
        return replace(model, params=jax.tree.map(there, model.params), tokenizer=tokenizer, mesh=self.mesh)

    def responder(self, model: Model, *args: Any) -> Answers:
        """`responses.responder` on these devices."""
        answers = responder(model, *args)

        def placed(missing: Sequence[EvaluationBatch]) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
            with self.place():
                yield from answers(missing)

        return placed


def replicas(mesh: str | None, devices: Sequence[Any] | None = None) -> list[Replica]:
    """The replicas of a mesh such as "data=2,model=4" over these devices, all of JAX's by default.

    Without a mesh, each process holds the model once, over all of its devices.

    Raises ValueError for a text that is no mesh, one of another size, and a replica that would share a process with a
    part of another.
    """
    devices = list(jax.devices() if devices is None else devices)
    devices.sort(key=lambda device: (device.process_index, device.id))
    by_process = {device.process_index: 0 for device in devices}
    for device in devices:
        by_process[device.process_index] += 1
    local = max(by_process.values())
    sizes = mesh_sizes(f"data={len(by_process)},model={local}" if mesh is None else mesh)
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"The mesh {mesh} is for {math.prod(sizes.values())} devices, and {len(by_process)} processes have "
            f"{len(devices)}."
        )
    each = sizes["sequence"] * sizes["model"]
    if local % each and each % local:
        raise ValueError(
            f"Each replica of the mesh {mesh} takes {each} devices and each process has {local}; one of these numbers "
            "must divide the other."
        )
    text = f"sequence={sizes['sequence']},model={sizes['model']}"
    parts = [tuple(devices[i : i + each]) for i in range(0, len(devices), each)]
    return [Replica(i, part, named_mesh(text, part) if each > 1 else None) for i, part in enumerate(parts)]


@dataclass(frozen=True)
class ReplicaGroup:
    """All replicas, and what those with devices of this process answer with."""

    replicas: Sequence[Replica]
    here: Sequence[tuple[Replica, Answers]]
    process: int = 0


def scatter(team: ReplicaGroup, batches: Sequence[EvaluationBatch], post: Post | None = None) -> Answers:
    """What process 0 gives `runner.record`: batches answered by all replicas, of other processes too.

    Only what is not answered yet is shared out, so that another number of processes may go on. Answers of others come
    by `post`, each with its number among all; without one there are none.
    """
    singles = [replace(batch, jobs=(job,)) for batch in batches for job in batch.jobs]
    numbers = _numbers(batches)

    def answers(missing: Sequence[EvaluationBatch]) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
        parts = shares([batch.cost for batch in missing], len(team.replicas))
        work = [[numbers[key] for i in part for key in missing[i].keys] for part in parts]
        if post is not None:
            post.tell("work", msgspec.json.encode(work).decode())
        done, left, looked = _begin(team, batches, work), {number for part in work for number in part}, 0.0
        while left:
            found = _next(done)
            if post is not None and time.monotonic() - looked > POLL_SECONDS:
                sent = post.take("answers")
                found += [(int(number), msgspec.json.decode(text, type=Response)) for number, text in sent]
                looked = time.monotonic()
            for number, given in found:
                left.discard(number)
                yield singles[number], [given]

    return answers


def serve(team: ReplicaGroup, batches: Sequence[EvaluationBatch], post: Post) -> None:
    """What every other process does: its share of the work, and the answers to process 0."""
    work = msgspec.json.decode(post.hear("work"), type=list[list[int]])
    done = _begin(team, batches, work)
    left = sum(len(work[replica.number]) for replica, _ in team.here)
    while left:
        for number, given in _next(done):
            left -= 1
            if given is not None:
                post.tell(f"answers/{number}", msgspec.json.encode(given).decode())


def _numbers(batches: Sequence[EvaluationBatch]) -> dict[AnswerKey, int]:
    """The number of each answer among all."""
    return {key: number for number, key in enumerate(key for batch in batches for key in batch.keys)}


def _next(done: queue.SimpleQueue[Any]) -> list[tuple[int, Any]]:
    """One answer that a replica here has found, if there is one soon. Raises what stopped a replica."""
    try:
        item = done.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return []
    if isinstance(item, BaseException):
        raise item
    return [item]


def _begin(
    team: ReplicaGroup, batches: Sequence[EvaluationBatch], work: Sequence[Sequence[int]]
) -> queue.SimpleQueue[Any]:
    """Starts a thread for each replica here; its queue gets (number, answer), None for an answer of another leader."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    numbers = _numbers(batches)

    def answer_all(replica: Replica, answers: Answers, mine: Sequence[EvaluationBatch]) -> None:
        begin, leads = time.monotonic(), replica.processes[0] == team.process
        try:
            for part, given in answers(mine):
                for key, answer in zip(part.keys, given, strict=True):
                    done.put((numbers[key], answer if leads else None))
                _log.info(
                    "replica %d: %s with budget %s answers %s, %.1f s after it began",
                    replica.number,
                    *part.keys[-1],
                    time.monotonic() - begin,
                )
        except BaseException as error:
            done.put(error)

    for replica, answers in team.here:
        its_own = set(work[replica.number])
        others = {key for key, number in numbers.items() if number not in its_own}
        mine = [part for batch in batches if (part := batch.without(others)) is not None]
        if mine:
            threading.Thread(target=answer_all, args=(replica, answers, mine), daemon=True).start()
    return done
