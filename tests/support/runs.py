"""Runs of an evaluation whose answers a function gives, batch by batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterkv_jax.evaluation import runner
from clusterkv_jax.evaluation.batching import EvaluationBatch, Job, MethodEntry, plan
from clusterkv_jax.evaluation.records import Record
from clusterkv_jax.evaluation.responses import Answers, Response
from clusterkv_jax.evaluation.settings import settings


def run(
    folder: Path,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    jobs: Sequence[Job],
    entries: Sequence[MethodEntry],
    respond: Callable[..., Sequence[Response]],
    *,
    batch_size: int = 16,
    possible: Callable[..., bool] = lambda method, prompt, new: True,
    **options: Any,
) -> list[Record]:
    """`runner.record` of these jobs, one batch after the other."""
    batches = plan(jobs, entries, batch_size, possible)
    return runner.record(folder, settings(config, jobs, entries), about, batches, in_turn(respond), **options)


def in_turn(respond: Callable[..., Sequence[Response]]) -> Answers:
    """One batch after the other, by its method, prompts, most new tokens and stop strings."""

    def answers(batches: Sequence[EvaluationBatch]) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
        for batch in batches:
            first = batch.jobs[0].case
            prompts = [job.prompt for job in batch.jobs]
            yield batch, respond(batch.method, prompts, first.max_new_tokens, first.stop)

    return answers
