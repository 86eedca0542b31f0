"""`clusterkv evaluate` over replicas and processes: who answers what, who writes, and where it is noted."""

import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from clusterkv_jax.cli.process import ERROR, INTERRUPTED, RESTART
from clusterkv_jax.cli.process_group import ProcessGroup, join
from clusterkv_jax.cli.terminal import sentence
from clusterkv_jax.evaluation import replicas, runner
from clusterkv_jax.evaluation.batching import EvaluationBatch
from clusterkv_jax.evaluation.outputs import Lost, Output
from clusterkv_jax.evaluation.replicas import Replica, ReplicaGroup
from clusterkv_jax.runtime.errors import shown

_log = logging.getLogger(__name__)


@contextmanager
def joined(
    distributed: bool,
    output: Output | None,
    address: str | None,
    count: int | None,
    index: int | None,
    timeout: float,
    debug: bool,
) -> Iterator[ProcessGroup | None]:
    """The processes of a job, all of which end when the block does; None where there is one process alone.

    Each of them notes in logs/process-K.log of the output, if there is one, what it does.
    """
    if not distributed:
        if (address, count, index) != (None, None, None):
            raise ValueError("--coordinator-address, --num-processes and --process-id need --distributed.")
        yield None
        return
    peers = join(address, count, index, timeout)
    try:
        if output is not None:
            _note(output.log(peers.index))
        _log.info("process %d of %d on %s", peers.index, len(peers.hosts), peers.hosts[peers.index])
        yield peers
        peers.finish()
    except KeyboardInterrupt:
        peers.fail("Interrupted.", INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        _log.info("%s", traceback.format_exc())
        if isinstance(error, jax.errors.JaxRuntimeError):
            peers.wait_for_a_loss()
        if isinstance(error, Lost):
            peers.fail(f"has lost its bucket: {error}", RESTART)
        peers.fail(sentence(error), ERROR)


def the_replicas(mesh: str | None, peers: ProcessGroup | None) -> list[Replica]:
    """As `replicas.replicas`; without a mesh, one process alone uses its first device."""
    alone = mesh is None and peers is None
    return replicas.replicas(mesh, jax.local_devices()[:1] if alone else None)


def answered(
    output: Output,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    batches: Sequence[EvaluationBatch],
    team: ReplicaGroup,
    peers: ProcessGroup | None,
    on_lines: Any,
) -> list[Any]:
    """`runner.record` by all replicas, which process 0 alone calls."""
    if peers is not None:
        peers.tell("config", _as_text(config))
        answers = replicas.scatter(team, batches, peers)
        writing = output.sending(peers.writing)
        return runner.record(output.folder, config, about, batches, answers, writing=writing, on_lines=on_lines)
    alone = len(team.replicas) == 1
    answers = team.here[0][1] if alone else replicas.scatter(team, batches)
    writing = output.sending(nullcontext())
    return runner.record(output.folder, config, about, batches, answers, writing=writing, on_lines=on_lines)


def serve(
    config: Mapping[str, Any], batches: Sequence[EvaluationBatch], team: ReplicaGroup, peers: ProcessGroup
) -> None:
    """What the other processes do. Raises ValueError where process 0 was asked something else."""
    theirs, ours = json.loads(peers.hear("config")), json.loads(_as_text(config))
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"Process 0 runs with {name} = {shown(theirs.get(name))}, and this process with "
                f"{shown(ours.get(name))}; give all processes the same command."
            )
    replicas.serve(team, batches, peers)


def _as_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config)


def _note(handler: logging.Handler) -> None:
    """Messages of this library go there from now on."""
    logger = logging.getLogger("clusterkv_jax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
