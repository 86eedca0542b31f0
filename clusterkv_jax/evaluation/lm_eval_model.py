"""lm-evaluation-harness with a compressed cache: its model `clusterkv`.

    clusterkv lm-eval --model clusterkv --model_args model=demo,method=centroidkv,cache_ratio=0.2 --tasks gsm8k

The harness finds models by imports of its own, so this project's command registers the model and then calls the
harness's. What stands before an answer or a continuation, question included, is the context that is compressed.

In a job of several processes the harness runs on process 0. The others hear of the model and, round by round, of the
batches that they answer.
"""

# The harness is an extra that the type checker need not have.
# pyright: reportMissingImports=false, reportImplicitOverride=false

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import jax
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from msgspec import Meta

from clusterkv_jax.budget import Budget
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.checkpoints.model_dir import locate
from clusterkv_jax.evaluation import responses, work_queue
from clusterkv_jax.evaluation.batching import EvaluationBatch, Job, MethodEntry, batches
from clusterkv_jax.evaluation.replicas import Post, Replica, ReplicaGroup, replicas
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.evaluation.work_queue import WorkQueue
from clusterkv_jax.methods import Full
from clusterkv_jax.presets import AUTO, as_method, check_calibrated, is_calibrated
from clusterkv_jax.sampling import Sampling
from clusterkv_jax.storage import schema
from clusterkv_jax.text.chat import render
from clusterkv_jax.text.tokenizer import encode

NAME = "clusterkv"
# Tokens of a long text that are read from one compressed cache before it is compressed afresh.
BLOCK = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """What --model_args may name.

    Attributes:
        model: "demo", a folder or a hub id.
        method: a method, a preset, its .yaml file, or FILE.py:Class; the full cache by default.
        cache_ratio, cache_tokens: its budget, one of them.
        dtype: of the parameters.
        max_length: most tokens of context and answer, at most the model's positions.
        batch_size: most examples read together.
        max_batch_size, device: given by the harness and not used.
    """

    model: str = "demo"
    method: str = "full"
    cache_ratio: float | None = None
    cache_tokens: int | None = None
    dtype: str | None = None
    max_length: int | None = None
    batch_size: int | Annotated[str, Meta(pattern=r"^[0-9]{1,9}\Z")] = 16
    max_batch_size: Any = None
    device: Any = None


@dataclass(frozen=True)
class Pod:
    """Where the model lies, and who else answers with it.

    Attributes:
        replicas: of all processes.
        process: the number of this one.
        post: what carries texts to and from the others; None where there are none.
    """

    replicas: Sequence[Replica]
    process: int = 0
    post: Post | None = None

    def load(self, asked: Arguments) -> tuple[Model, Callable[[Sequence[EvaluationBatch]], ReplicaGroup]]:
        """The model on the devices of this process, and the team that answers such batches with it."""
        here = [replica for replica in self.replicas if self.process in replica.processes]
        model = here[0].load(asked.model, asked.dtype)
        models = [model, *(replica.copy(model) for replica in here[1:])]

        def team(batches: Sequence[EvaluationBatch]) -> ReplicaGroup:
            size = int(asked.batch_size)
            answers = [replica.responder(each, batches, size) for replica, each in zip(here, models, strict=True)]
            return ReplicaGroup(self.replicas, list(zip(here, answers, strict=True)), self.process)

        return model, team


class CompressedLM(TemplateLM):
    """The harness's interface to a model whose caches a method compresses; made of `Arguments`."""

    # The harness makes the model itself, of texts. Without a pod it lies on the first device.
    pod: ClassVar[Pod | None] = None
    queue: ClassVar[WorkQueue] = WorkQueue(None)

    def __init__(self, **given: Any) -> None:
        super().__init__()
        asked = _arguments(given)
        pod = self.pod or Pod(replicas(None, jax.local_devices()[:1]))
        self.entry = _entry(asked)
        self.method = self.entry.method
        self.queue.load(given)
        self.loaded, self.team = pod.load(asked)
        if self.loaded.tokenizer is None:
            raise ValueError(f"Model {asked.model} has no tokenizer, which the harness needs.")
        self.tokenizer = self.loaded.tokenizer
        self.batch_size = int(asked.batch_size)
        positions = self.loaded.config.max_positions
        if asked.max_length is not None and not 1 < asked.max_length <= positions:
            raise ValueError(
                f"max_length must be between 2 and the model's {positions} positions, got {asked.max_length}."
            )
        self.max_length = asked.max_length or positions

    # --- what the harness asks about the tokenizer ---

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text, where the tokenizer names one."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context. Raises ValueError where the tokenizer names no such token."""
        first = self._first_token
        if first is None:
            raise ValueError(f"The tokenizer of {self.loaded.name} names no token to begin or end a text with.")
        return first

    @property
    def _first_token(self) -> int | None:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """Distinguishes cached requests."""
        return self.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text; a text that begins with the first token of texts gets no second one."""
        del kwargs
        return encode(self.tokenizer, string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Few-shot examples and a question as the model's chat."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return render(self.tokenizer, [chat_history], **how)[0]

    # --- its three requests ---

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text; drawn where the task says do_sample, alone at temperature 1."""
        del disable_tqdm
        jobs = [self._generation(number, *request.args) for number, request in enumerate(requests)]

        def keep(number: int, answer: Response) -> None:
            self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)

        return [answer.text for answer in self._answers(jobs, keep)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of max_length; within one, every 256 tokens the cache of all that
        stands before is compressed afresh, so that the budget holds everywhere.
        """
        del disable_tqdm
        jobs, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(utils.make_disjoint_window, windows):
                step = len(continuation) if self.method == Full() else BLOCK
                for at in range(0, len(continuation), step):
                    jobs.append(_job(len(jobs), [*context, *continuation[:at]], continuation[at : at + step]))
                    owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, answer in zip(owners, self._answers(jobs), strict=True):
            totals[owner] += sum(answer.logprobs)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del disable_tqdm, kwargs
        jobs = []
        for number, (_, context, continuation) in enumerate(requests):
            context_cut = self._fit(context, len(continuation) - 1)  # the last token is foretold, never read
            jobs.append(_job(number, context_cut, continuation))

        def keep(number: int, answer: Response) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[number][0], _likelihood(answer))

        return [_likelihood(answer) for answer in self._answers(jobs, keep)]

    # --- how they are answered ---

    def _generation(self, number: int, text: str, settings: dict[str, Any]) -> Job:
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        new = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256)
        context = self._fit(self.tok_encode(text), new)
        stop = tuple(part for part in stop if part)
        case = Case(str(number), NAME, max_new_tokens=new, stop=stop, sampling=_sampling(settings))
        return Job(number, case, EncodedPrompt(tuple(context)))

    def _fit(self, context: list[int], new: int) -> list[int]:
        """The end of a context that is too long, as the harness's other models do, with a warning."""
        room = self.max_length - new
        if room < 1:
            raise ValueError(f"{new} new tokens leave no room for a context within max_length = {self.max_length}.")
        if len(context) > room:
            _log.warning("A context of %d tokens loses its first %d to fit.", len(context), len(context) - room)
        return context[-room:]

    def _answers(
        self, jobs: Sequence[Job], keep: Callable[[int, Response], None] = lambda number, answer: None
    ) -> list[Response]:
        """Answers in the order of the jobs; prompts that are too short for the budget get the full cache.

        Each answer goes to `keep` as it comes: to the file of --use_cache, which a job that starts again reads.
        """
        fits = [responses.possible(self.loaded, self.method, job.prompt, job.case.max_new_tokens) for job in jobs]
        if not all(fits):
            _log.warning(
                "%d of %d contexts are too short for the budget: full cache.", len(fits) - sum(fits), len(fits)
            )
        asked = [
            EvaluationBatch(self.entry, method, tuple(part))
            for method, is_method in ((self.method, True), (Full(), False))
            for part in batches([job for job, fit in zip(jobs, fits, strict=True) if fit is is_method], self.batch_size)
        ]
        by_number: dict[int, Response] = {}
        for part, answers in self.queue.answers(self.team(asked), asked):
            for job, answer in zip(part.jobs, answers, strict=True):
                by_number[job.number] = answer
                keep(job.number, answer)
        return [by_number[job.number] for job in jobs]


def _arguments(given: dict[str, Any]) -> Arguments:
    schema.check_keys(given, [field.name for field in fields(Arguments)], "--model_args")
    asked = schema.checked(given, Arguments, "--model_args")
    if int(asked.batch_size) < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {asked.batch_size}.")
    return asked


def _entry(asked: Arguments) -> MethodEntry:
    """The method with its budget."""
    rows, ratio = asked.cache_tokens, asked.cache_ratio
    if ratio is not None and rows is not None:
        raise ValueError(f"Give cache_ratio or cache_tokens, not both (got {ratio} and {rows}).")
    budget = None if ratio is None and rows is None else Budget(ratio=ratio, tokens=rows)
    learned = asked.method != AUTO or is_calibrated(asked.model)
    method = as_method(asked.method, budget=budget, learned=learned, model=asked.model)
    check_calibrated(asked.model, None, {asked.method: method})
    return MethodEntry(asked.method, str(ratio or rows or "1.0"), method)


def _sampling(settings: dict[str, Any]) -> Sampling:
    """How a task wants its answers: greedy unless it says do_sample, as transformers does."""
    if not settings.get("do_sample"):
        return Sampling()
    filters = {name: settings.get(name) for name in ("top_k", "top_p", "min_p")}
    temperature = settings.get("temperature")
    return Sampling(temperature=1.0 if temperature is None else float(temperature), **filters)


def _likelihood(answer: Response) -> tuple[float, bool]:
    return sum(answer.logprobs), answer.greedy


def _job(number: int, context: Sequence[int], continuation: Sequence[int]) -> Job:
    return Job(number, Case(str(number), NAME, metric="nll"), EncodedPrompt(tuple(context), (), tuple(continuation)))


def register() -> None:
    """Make the model known to the harness under its name."""
    if NAME not in model_registry:
        model_registry.register(NAME)(CompressedLM)


def _with_a_folder(argument: str) -> str:
    """The argument with "demo" as its folder: tasks that make texts load a tokenizer by the model's name."""
    return re.sub(r"(?<![^=,\s])model=demo(?![^,\s])", lambda _: f"model={locate('demo')}", argument)


def main(arguments: Sequence[str], pod: Pod | None = None) -> None:
    """The harness's own command, with the model registered. Raises ValueError where it ends with an error."""
    from lm_eval.__main__ import cli_evaluate

    register()
    CompressedLM.pod, CompressedLM.queue = pod, WorkQueue(None if pod is None else pod.post)
    sys.argv = ["lm_eval", *map(_with_a_folder, arguments)]
    try:
        cli_evaluate()
    except SystemExit as end:
        if end.code:
            raise ValueError(f"The harness ended with {end.code}; it says why above.") from end
    CompressedLM.queue.end()


def serve(pod: Pod, post: Post) -> None:
    """What the other processes do while the harness runs on process 0."""

    def load(given: dict[str, Any]) -> tuple[MethodEntry, Callable[[Sequence[EvaluationBatch]], ReplicaGroup]]:
        asked = _arguments(given)
        return _entry(asked), pod.load(asked)[1]

    work_queue.serve(post, load)
