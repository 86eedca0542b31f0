"""What a run asks, in batches that depend on its configuration alone: no kill and no number of processes changes them.

jobs x entries -> batches of similar length -> their shares among replicas of the model
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.generation.batch import QUESTION_STEP, bucket
from clusterkv_jax.methods import Full, Method

AnswerKey = tuple[str, str, str]  # method, budget, example
# A token that is written takes as long as some that are read: one step reads all parameters for one token.
WRITTEN = 16


@dataclass(frozen=True)
class MethodEntry:
    """A row of the table: a method by its preset's name, its budget as given (a share or a number of rows)."""

    name: str
    budget: str
    method: Method


@dataclass(frozen=True)
class Job:
    """A case, the tokens it became, and its number in the suite."""

    number: int
    case: Case
    prompt: EncodedPrompt


@dataclass(frozen=True)
class EvaluationBatch:
    """Jobs that an entry answers together: by its method or, where its budget is impossible, by the full cache."""

    entry: MethodEntry
    method: Method
    jobs: tuple[Job, ...]

    @property
    def keys(self) -> list[AnswerKey]:
        """What distinguishes its answers."""
        return [(self.entry.name, self.entry.budget, job.case.id) for job in self.jobs]

    @property
    def compressed(self) -> bool:
        """Whether the entry's own method answers."""
        return self.method == self.entry.method

    @property
    def scores(self) -> bool:
        """Whether continuations are scored; otherwise texts are written."""
        return bool(self.jobs[0].prompt.continuation)

    def without(self, answered: Collection[AnswerKey]) -> "EvaluationBatch | None":
        """What is left of it; continuations are scored together, so that a sum's last bits are those of all."""
        jobs = tuple(job for key, job in zip(self.keys, self.jobs, strict=True) if key not in answered)
        return None if not jobs else self if self.scores else replace(self, jobs=jobs)

    @property
    def cost(self) -> int:
        """About how long it takes, in tokens read: equal contexts are read once, and the longest answer counts."""
        unique = {job.prompt.context for job in self.jobs}
        asked = sum(len(job.prompt.question) + len(job.prompt.continuation) for job in self.jobs)
        written = max(len(job.prompt.continuation) or job.case.max_new_tokens for job in self.jobs)
        return len(unique) * max(map(len, unique)) + asked + WRITTEN * written


def with_full(entries: Sequence[MethodEntry], full: Method) -> list[MethodEntry]:
    """The entries with the full cache, which all are held against; the first where it is not among them."""
    return (
        [*entries] if any(entry.name == "full" for entry in entries) else [MethodEntry("full", "1.0", full), *entries]
    )


def plan(
    jobs: Sequence[Job],
    entries: Sequence[MethodEntry],
    batch_size: int,
    possible: Callable[[Method, EncodedPrompt, int], bool] = lambda method, prompt, new: True,
) -> list[EvaluationBatch]:
    """The batches of all entries, in the order in which one process answers them.

    `possible` says whether a budget is possible for a prompt of these sizes; where it is not, the full cache answers.

    Raises ValueError for a batch size below 1, examples of one name, and a budget that is possible for no prompt.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if len({job.case.id for job in jobs}) < len(jobs):
        raise ValueError("The suite names two examples alike, so their answers could not be told apart.")
    return [batch for entry in entries for batch in _split(entry, jobs, batch_size, possible)]


def batches(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Jobs that share programs and contexts, `size` at a time: of equal buckets, new tokens and stops."""

    def kind(job: Job):
        prompt, case = job.prompt, job.case
        return (
            bool(prompt.continuation),
            case.max_new_tokens,
            case.stop,
            bucket(len(prompt.context), 64),
            bucket(len(prompt.question), QUESTION_STEP) if prompt.question else 0,
            bucket(len(prompt.continuation), 16) if prompt.continuation else 0,
        )

    first: dict[tuple[int, ...], int] = {}
    for job in jobs:
        first.setdefault(job.prompt.context, job.number)
    ordered = sorted(jobs, key=lambda job: (kind(job), first[job.prompt.context], job.number))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or end - start == size or kind(ordered[end]) != kind(ordered[start]):
            yield ordered[start:end]
            start = end


def shares(costs: Sequence[int], replicas: int) -> list[list[int]]:
    """Numbers of batches for each replica: the longest first, each to whom has least so far (R. Graham, 1969)."""
    result: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        result[least].append(number)
        loads[least] += costs[number]
    return result


def _split(
    entry: MethodEntry, jobs: Sequence[Job], size: int, possible: Callable[[Method, EncodedPrompt, int], bool]
) -> Iterator[EvaluationBatch]:
    """The entry's batches, those that its budget is impossible for with the full cache."""
    by_size: dict[tuple[int, ...], bool] = {}  # prompts of one size share their answer, which takes a while
    for job in jobs:
        if _sizes(job) not in by_size:
            by_size[_sizes(job)] = possible(entry.method, job.prompt, job.case.max_new_tokens)
    fits = [by_size[_sizes(job)] for job in jobs]
    if not any(fits):
        lengths = [len(job.prompt.context) for job in jobs]
        raise ValueError(
            f"{entry.name} with budget {entry.budget} is impossible for every prompt; they have {min(lengths)} to "
            f"{max(lengths)} tokens."
        )
    for method, is_method in ((entry.method, True), (Full(), False)):
        for batch in batches([job for job, fit in zip(jobs, fits, strict=True) if fit is is_method], size):
            yield EvaluationBatch(entry, method, tuple(batch))


def _sizes(job: Job) -> tuple[int, ...]:
    """What decides whether a budget is possible."""
    prompt = job.prompt
    return len(prompt.context), len(prompt.question), len(prompt.continuation), job.case.max_new_tokens
