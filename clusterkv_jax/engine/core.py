"""`EngineCore`: requests wait, are read, decode together and leave, one step after the other."""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import Context, ContextStore, PrefillResult
from clusterkv_jax.engine.continuation import left_behind
from clusterkv_jax.engine.handle import Handle, OnOutput, RequestStatus
from clusterkv_jax.engine.layout import EngineLayout
from clusterkv_jax.engine.logits import Logprobs, checked_mask
from clusterkv_jax.engine.metrics import (
    Counters,
    EngineStats,
    add_counts,
    engine_stats,
    retry_after_s,
    with_first_token,
)
from clusterkv_jax.engine.outputs import RequestOutput, check_tokens, output_of, result_of, token_logprobs
from clusterkv_jax.engine.prefill import Prefiller
from clusterkv_jax.engine.requests import EngineFull, Request, answers
from clusterkv_jax.engine.runner import ModelRunner
from clusterkv_jax.engine.scheduler import (
    Key,
    RunningSequence,
    SchedulerState,
    enqueue,
    find,
    is_full,
    most_steps,
    next_requests,
    place,
    remove,
    with_tokens,
)
from clusterkv_jax.generation.results import Result
from clusterkv_jax.methods import Method
from clusterkv_jax.runtime.errors import out_of_memory_explained
from clusterkv_jax.runtime.prng import seed_words
from clusterkv_jax.runtime.programs import Compilation, compilation
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import on_mesh
from clusterkv_jax.text.growing import grown
from clusterkv_jax.text.stops import shorten, show


class _NobodyWaitsError(Exception):
    """Ends the reading of a prompt whose request was cancelled."""


class EngineCore:
    """The queue, the slots and what becomes of requests. One thread uses it.

    Attributes:
        entering: most requests that enter between two calls of the decode program.
        most_waiting: most requests in the queue, and most bytes of their tokens.
        schedule: who waits and who runs.
        handles: of all requests that have not come to an end.
        listeners: what `Engine.stream` reads.
        on_pause: called while a prompt is read, now and then; may cancel requests.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        layout: EngineLayout,
        contexts: ContextStore,
        *,
        entering: int,
        most_waiting: tuple[int, int],
    ) -> None:
        self.model, self.method, self.layout, self.contexts = model, method, layout, contexts
        self.entering, self.most_waiting = entering, most_waiting
        with own_settings(), self._on_mesh():
            self.runner = ModelRunner(model, method, layout)
        self.prefiller = Prefiller(model, method, layout, contexts, self._pause)
        self.on_pause: Callable[[], None] = lambda: None
        self.schedule = SchedulerState((), (None,) * layout.slots)
        self.handles: dict[Key, Handle] = {}
        self.listeners: list[deque[tuple[Handle, str]]] = []
        self._counters, self._compiling = Counters(), Compilation()
        self.context_numbers = itertools.count()

    # --- what an engine says ---

    def check_room(self, request: Request, ahead: int = 0) -> None:
        """Raise EngineFull if the queue has no place for a request behind it and `ahead` others."""
        if self.is_full(request, ahead):
            raise EngineFull(len(self.schedule.waiting) + ahead, retry_after_s(self._counters))

    def submit(self, request: Request, on_output: OnOutput | None = None) -> list[Handle]:
        """Put a request behind those that wait: a handle for each of its answers, however full the queue is."""
        handles = []
        for each in answers(request):
            handles.append(Handle(self, each.key, on_output))
            self.handles[each.key] = handles[-1]
            self.schedule = enqueue(self.schedule, each)
        return handles

    def is_full(self, request: Request, ahead: int = 0) -> bool:
        """Whether the queue has no place for a request behind it and `ahead` others."""
        return is_full(self.schedule, request, *self.most_waiting, ahead)

    def cancel(self, key: Key) -> None:
        """End a request now; one that has come to its end stays as it is."""
        if key in self.handles:
            slot, sequence = find(self.schedule, key)
            self._finish(sequence, "cancelled", self._result(slot, sequence, self.now()))

    def fail(self, key: Key, error: Exception) -> None:
        """End a request with this error."""
        self._finish(find(self.schedule, key)[1], "failed", error)

    def step(self) -> None:
        """Let requests enter, decode for all slots once, and let those that have ended leave."""
        with self.at_work():
            self._admit_waiting()
            self._decode()

    def compact(self, context: Context) -> Context:
        """A context at its budget, at work."""
        cache, new = self.prefiller.held(context)[0].cache, context.max_new_tokens
        result = left_behind(self.model, self.method, self.layout, cache, context.length, new, compact=True)
        return self._new_context(context.tokens, context.seed, new, result)

    def stats(self) -> EngineStats:
        """How the engine does."""
        schedule = self.schedule
        sizes = len(schedule.running), len(schedule.waiting), len(schedule.active)
        held = self.contexts.counts(), self.contexts.nbytes()
        return engine_stats(self._counters, sizes, *held, self.layout.memory)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around all that runs programs: JAX's settings, the mesh, errors of one sentence, and the seconds it takes."""
        begin = time.perf_counter()
        doing = f"serving {self.layout.slots} slots of {self.layout.limits.max_tokens:,} tokens"
        explained = out_of_memory_explained(doing, uses_host=self.method.storage == "host")
        with own_settings(), compilation() as total, self._on_mesh(), explained:
            self._compiling = total
            try:
                yield
            finally:
                busy_s = time.perf_counter() - begin
                self._count(busy_s=busy_s, compile_s=total.seconds, programs=total.programs)
                self._compiling = Compilation()

    def now(self) -> float:
        """Seconds of a clock that stands still while the engine compiles."""
        return time.perf_counter() - self.compiled_s

    @property
    def compiled_s(self) -> float:
        """Seconds that the engine has compiled."""
        return self._counters.compile_s + self._compiling.seconds

    # --- stages of a step ---

    def _admit_waiting(self) -> None:
        """Requests that wait enter free slots, with their questions and first tokens."""
        entered = 0
        while requests := next_requests(self.schedule, self.entering - entered):
            entered += len(requests)
            placed = zip(requests, self.schedule.free, strict=False)
            new = [slot for request, slot in placed if self._admit(request, slot)]
            new = [slot for slot in new if self.schedule.running[slot] is not None]  # who has not been cancelled since
            self.runner.append_questions({slot: self.schedule.sequence(slot).request for slot in new})
            self._sample_first(new)

    def _admit(self, request: Request, slot: int) -> bool:
        """Put a request's cache into a slot; False if its prompt cannot be read, or nobody waits for it any more."""
        if request.key not in self.handles:
            return False
        try:
            cached = 0
            if request.context is None:
                result = self.prefiller.of_prompt(request, self.schedule.waiting[1:2])
            else:
                needed = len(request.question), request.batch.max_new_tokens
                result, cached = self.prefiller.of_context(request.context, *needed)
            self.runner.insert(slot, result)
        except _NobodyWaitsError:
            return False
        except (ValueError, MemoryError) as error:
            self._finish(RunningSequence(request), "failed", error)
            return False
        if request.key not in self.handles:
            return False
        if request.keep_prompt and request.context is None and request.index == 0:
            self.handles[request.key].prompt_context = self._prompt_context(request, result)
        sequence = RunningSequence(request, seed_words(request.seed), result.rows, cached=cached)
        self.schedule = place(self.schedule, slot, sequence)
        self.handles[request.key].state = "active"
        return True

    def _pause(self, request: Request | None) -> None:
        """Between two layers of a prompt: those go on for whose tokens somebody waits. Raises _NobodyWaitsError for a
        request that was cancelled meanwhile.
        """
        self.on_pause()
        if any(self.schedule.sequence(slot).request.stream for slot in self.schedule.decoding):
            self._decode()
        if request is not None and request.key not in self.handles:
            raise _NobodyWaitsError

    def _sample_first(self, new: list[int]) -> None:
        """Draw the first tokens of new slots."""
        if not new:
            return
        masks = self._masks(new)
        new = [slot for slot in new if self.schedule.running[slot] is not None]
        tokens, logprobs = self.runner.sample_first(self.schedule.running, new, masks)
        now = self.now()
        for slot in new:
            waited_s = now - self.schedule.sequence(slot).request.added_s
            self._counters = with_first_token(self._counters, waited_s)
            self._emit(slot, tokens[slot].tolist(), now, logprobs)

    def _decode(self) -> None:
        """One call of the decode program, which ends early where a slot ends for which somebody waits."""
        masks = self._masks(self.schedule.decoding)
        if not (active := self.schedule.decoding):
            return
        fewest, most = len(active) if self.schedule.waiting else 1, most_steps(self.schedule)
        tokens, logprobs, steps = self.runner.decode(self.schedule.running, active, masks, most, fewest)
        self._count(steps=steps, active_steps=int((tokens != -1).sum()))
        now = self.now()
        for slot in active:
            if self.schedule.running[slot] is not None:  # nobody who listens has cancelled it since
                self._emit(slot, tokens[slot].tolist(), now, logprobs)

    def _masks(self, slots: Sequence[int]) -> dict[int, np.ndarray]:
        """Allowed tokens of those slots that have a grammar; a request whose grammar fails is at its end."""
        masks = {}
        for slot in slots:
            sequence = self.schedule.sequence(slot)
            if (allowed := sequence.request.allowed_tokens) is None:
                continue
            try:
                if (mask := allowed(sequence.tokens)) is not None:
                    masks[slot] = checked_mask(mask, self.model.config.vocab_size)
            except Exception as error:
                self._finish(sequence, "failed", error)
        return masks

    def _emit(self, slot: int, new: list[int], now: float, logprobs: Logprobs | None) -> None:
        """A slot's new tokens: what can be said of them, and whether they are the last ones."""
        model, before = self.model, self.schedule.sequence(slot)
        request = before.request
        sequence = with_tokens(before, new, now, token_logprobs(request, logprobs, slot, new))
        tokens = list(sequence.tokens)
        try:
            check_tokens(model, self.method, request, tokens)
            stopped = shorten(model.tokenizer, tokens, request.batch.stops, sequence.known)
            overrun = len(tokens) < len(sequence.tokens)
            sequence = replace(sequence, tokens=tuple(tokens), ended=sequence.ended or stopped, overrun=overrun)
            self._count(new_tokens=len(tokens) - len(before.tokens))
            if sequence.ended:
                self._finish(sequence, "finished", self._result(slot, sequence, now))
            else:
                self._say(slot, sequence)
        except ValueError as error:
            self._finish(sequence, "failed", error)

    def _say(self, slot: int, sequence: RunningSequence) -> None:
        """A sequence goes on; pass on what is new of it, where somebody listens."""
        handle = self.handles[sequence.request.key]
        listened = self.listeners or handle.on_output is not None
        if not listened:
            self.schedule = place(self.schedule, slot, sequence)
            return
        shown, known, tokenizer = sequence.shown, sequence.known, self.model.tokenizer
        if tokenizer is not None:
            tokens, stops = list(sequence.tokens), sequence.request.batch.stops
            known = grown(tokenizer, tokens, known)
            shown = show(tokenizer, 0, tokens, shown, stops, False, lambda *_: None, known)
        said = replace(sequence, shown=shown, known=known, said=len(sequence.tokens))
        self.schedule = place(self.schedule, slot, said)
        self._deliver(handle, output_of(sequence, shown))

    # --- small parts ---

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return on_mesh(self.model.mesh, self.model.config.num_kv_heads)

    def _deliver(self, handle: Handle, output: RequestOutput) -> None:
        if handle.prompt_context is not None:
            output = replace(output, prompt_context=handle.prompt_context)
            handle.prompt_context = None
        if output.text:
            for listener in self.listeners:
                listener.append((handle, output.text))
        if handle.on_output is not None:
            handle.on_output(output)

    def _result(self, slot: int | None, sequence: RunningSequence, now: float) -> Result:
        """The result of a request; one that never had a slot has said nothing."""
        looked_at = None
        if slot is not None and not self.method.forgets:
            with self._on_mesh():
                looked_at = self.runner.statistics(slot)
        return result_of(self.model, sequence, self.layout, looked_at, now, self.compiled_s)

    def _context_of(self, sequence: RunningSequence) -> Context | None:
        """What an answer leaves, where the request asks for it and its slot has seen nothing else: all but the last
        token, which is in no cache.
        """
        request, slot = sequence.request, find(self.schedule, sequence.request.key)[0]
        if not request.keep or slot is None or not sequence.tokens or sequence.overrun:
            return None
        tokens = (*request.batch.texts[0], *request.question, *sequence.tokens[:-1])
        new = request.batch.max_new_tokens
        with own_settings(), self._on_mesh():
            result = self.runner.left_behind(slot, len(tokens), new)
        return self._new_context(tokens, request.read_seed, new, result)

    def _prompt_context(self, request: Request, result: PrefillResult) -> Context:
        """The prompt of a request, as it was read."""
        (tokens,), new = request.batch.texts, request.batch.max_new_tokens
        sizes = len(tokens), None, None, request.read_seed, new
        context = Context(next(self.context_numbers), tuple(tokens), *sizes, self.contexts)
        self.contexts.add(context, result)
        return context

    def _new_context(self, tokens: tuple[int, ...], seed: int, max_new_tokens: int, result: PrefillResult) -> Context:
        number, sizes = next(self.context_numbers), (len(tokens), None, None, seed, max_new_tokens)
        context = Context(number, tokens, *sizes, self.contexts, answered=True)
        self.contexts.add(context, result)
        return context

    def _finish(self, sequence: RunningSequence, state: RequestStatus, outcome: Result | Exception) -> None:
        """A request leaves, and its slot is free."""
        key = sequence.request.key
        context = self._context_of(sequence) if isinstance(outcome, Result) else None
        self.schedule = remove(self.schedule, key)
        self.prefiller.hold_for(self.schedule.waiting[:1])
        handle = self.handles.pop(key)
        handle.finish(state, outcome, context)
        self._count(**{state: 1})
        if isinstance(outcome, Result):
            self._deliver(handle, output_of(sequence, outcome.texts[0], outcome, context))
        elif handle.on_output is not None:
            handle.on_output(outcome)

    def _count(self, **more: float) -> None:
        self._counters = add_counts(self._counters, **more)
