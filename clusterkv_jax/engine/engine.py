"""`Engine`: requests in, pieces of text and results out. Its programs are in `runner`, its rules in `scheduler`."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.budget import Budget
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine import runner
from clusterkv_jax.engine.contexts import Context, ContextStore, Place, check_own
from clusterkv_jax.engine.handle import Handle, State
from clusterkv_jax.engine.layout import check_arguments, make_layout
from clusterkv_jax.engine.memory import MemoryPlan
from clusterkv_jax.engine.metrics import Counters, EngineStats, add_counts, engine_stats, with_first_token
from clusterkv_jax.engine.outputs import check_tokens, result_of
from clusterkv_jax.engine.prefill import Prefiller, is_file
from clusterkv_jax.engine.requests import Request, check_settings
from clusterkv_jax.engine.scheduler import (
    RunningSequence,
    Schedule,
    enqueue,
    find,
    is_full,
    next_requests,
    next_sampling,
    place,
    remove,
    with_tokens,
)
from clusterkv_jax.generation.results import Result
from clusterkv_jax.methods import Method
from clusterkv_jax.presets import completed, method_for
from clusterkv_jax.runtime.errors import out_of_memory_explained
from clusterkv_jax.runtime.prng import seed_words, spread
from clusterkv_jax.runtime.programs import Compilation, compilation
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import fetch, on_mesh
from clusterkv_jax.sampling import Sampling, check_seeds
from clusterkv_jax.text.prompts import Texts, listed
from clusterkv_jax.text.stops import shorten, show

# Steps of one call of the decode program; between two, requests enter and leave.
SEGMENT = 32
# Most bytes of contexts where nobody says how many.
HOST_BYTES, DISK_BYTES = 8 * 2**30, 2**62


class Engine:
    """Serves many requests with one model and one method: they enter and leave the slots of one compiled program.

    Everything static is decided here. A request waits until a slot is free; those that came first enter first. Its
    prompt is read alone, compressed, and put into the slot; all slots decode together. Greedy tokens in float32 are
    those of `generate` for the prompt alone, and so are drawn ones of the same seed. One thread uses an engine, which
    works while `stream`, `run` or `Handle.result` is called. On a mesh that spans processes all of them ask the same.

    Args:
        model: from `load`.
        method: what is kept of the prompts, by a name such as "auto" or as an object; `Full()` by default.
        ratio: with a name, as in `generate`; and so are the next two.
        tokens: how many rows.
        budget: any budget.
        slots: sequences that are decoded together.
        max_tokens: most tokens of a prompt, its question and its answer; never more than the model's positions.
        reserve: most tokens of a question and its answer; a slot has room for so many behind a prompt's budget.
        questions_per_step: most requests that enter between two calls of the decode program; all slots by default.
        max_waiting: most requests in the queue; `add` works on them until there is room for one more.
        max_waiting_bytes: most bytes of their tokens, likewise.
        device_bytes: what weights, slots, a prompt and contexts may take; by default what the device has, if it says.
        context_bytes: of the contexts on the device; by default two slots' worth.
        context_host_bytes: of those in the host's memory.
        context_disk_bytes: of those in `context_folder`.
        context_folder: a folder that exists, for contexts that no memory has room for; None leaves them out.
        prefill_chunk: as in `generate`.
        keep_short: as in `generate`.

    Raises:
        ValueError: one sentence, for numbers that are not possible, and what does not fit `device_bytes`.
    """

    def __init__(
        self,
        model: Model,
        *,
        method: Method | str | None = None,
        ratio: float | None = None,
        tokens: int | None = None,
        budget: Budget | None = None,
        slots: int = 8,
        max_tokens: int = 32768,
        reserve: int = 1024,
        questions_per_step: int | None = None,
        max_waiting: int = 1024,
        max_waiting_bytes: int = 2**28,
        device_bytes: int | None = None,
        context_bytes: int | None = None,
        context_host_bytes: int = HOST_BYTES,
        context_disk_bytes: int = DISK_BYTES,
        context_folder: str | os.PathLike[str] | None = None,
        prefill_chunk: int | None = None,
        keep_short: bool = False,
    ) -> None:
        named = method_for(model, method, budget=budget, ratio=ratio, tokens=tokens)
        entering = slots if questions_per_step is None else questions_per_step
        counts = {"slots": slots, "reserve": reserve, "questions_per_step": entering, "max_waiting": max_waiting}
        sums = {"context_host_bytes": context_host_bytes, "context_disk_bytes": context_disk_bytes}
        sums |= {"max_waiting_bytes": max_waiting_bytes, "context_bytes": context_bytes or 0}
        sums |= {"device_bytes": device_bytes or 0}
        counts |= {} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}
        check_arguments(named, max_tokens, context_folder, counts, sums)
        self.model, self.method = model, completed(model, named)
        sizes = slots, max_tokens, reserve, context_bytes, device_bytes, prefill_chunk, keep_short
        with own_settings(), self._on_mesh():
            self._layout = make_layout(model, self.method, *sizes)
            self._slots = runner.empty(self._layout.one, self._layout.logits, slots, self.method)
        self._entering, self._max_waiting, self._max_waiting_bytes = entering, max_waiting, max_waiting_bytes
        places: dict[Place, int] = {"device": self._layout.context_bytes, "host": context_host_bytes}
        places["disk"] = 0 if context_folder is None else context_disk_bytes
        self._contexts = ContextStore(model.config, self.method, places, context_folder)
        self._schedule = Schedule((), (None,) * slots)
        self._handles: dict[int, Handle] = {}
        self._listeners: list[deque[tuple[Handle, str]]] = []
        self._prefiller = Prefiller(model, self.method, self._layout, self._contexts)
        self._counters, self._added, self._read_count, self._questions_compiled = Counters(), 0, 0, False
        self._compiling = Compilation()

    @property
    def memory(self) -> MemoryPlan:
        """What the engine takes of the device's memory."""
        return self._layout.memory

    # --- what a caller says ---

    def generate(
        self,
        prompts: Texts | Sequence[Context],
        *,
        questions: Texts | None = None,
        seed: int | Sequence[int] = 0,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        **options: Any,
    ) -> list[Result]:
        """What `generate` says of the prompts, in their order; equal ones that follow each other are read once.

        Args:
            prompts: as in `generate`.
            questions: one per prompt, or none.
            seed: one for all or a list, as in `generate`.
            on_stats: called with how the engine does after each step.
            options: of all of them, as in `add`.

        Raises ValueError as `add`, and what goes wrong later.
        """
        texts = listed(self.model, prompts, "prompt")
        asked = [None] * len(texts) if questions is None else listed(self.model, questions, "question")
        if len(asked) != len(texts):
            raise ValueError(f"Questions must be one per prompt, got {len(asked)} for {len(texts)} prompts.")
        check_seeds(seed, len(texts))
        seeds, handles = spread(seed, len(texts)), list[Handle]()
        try:
            for text, question, own_seed in zip(texts, asked, seeds, strict=True):
                handles.append(self._enqueue(text, question, seed=own_seed, read_seed=seeds[0], **options))
            while not all(handle.done for handle in handles):
                self.step()
                on_stats(self.stats())
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def add(
        self,
        prompt: Any,
        question: Any = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        **texts: Any,
    ) -> Handle:
        """A request behind those that wait.

        Args:
            prompt: a text, token ids, a `Context` of this engine, or the path (`pathlib.Path`) of a saved cache.
            question: a text or token ids, fed after the prompt has been compressed.
            max_new_tokens: as in `generate`, and so are the other three.
            sampling: greedy by default.
            stop: texts that end it.
            stop_ids: tokens that end it.
            seed: of its draws, which depend on it and on the number of the token alone, and of methods that draw.
            texts: `chat`, `system`, `chat_template_kwargs`, `special_tokens` as in `generate`; for a context in `read`.

        Raises ValueError at once for what cannot be served; what goes wrong later is raised by the handle's `result`.
        """
        sizes = {"max_new_tokens": max_new_tokens, "stop": stop, "stop_ids": stop_ids, **texts}
        return self._enqueue(prompt, question, sampling=sampling, seed=seed, read_seed=seed, **sizes)

    def _enqueue(
        self, prompt: Any, question: Any, *, sampling: Sampling | None = None, seed: int, read_seed: int, **sizes: Any
    ) -> Handle:
        """`add` of a request that is read by another seed than it draws by."""
        sampling = Sampling() if sampling is None else sampling
        check_settings(sampling, seed)
        context = self.read(prompt) if is_file(prompt) else prompt if isinstance(prompt, Context) else None
        if context is not None:
            check_own(context, self._contexts)
        batch = self._prefiller.batch(prompt if context is None else context, question, **sizes)
        length = len(batch.texts[0]) if context is None else context.length
        at = self._now(), self._compiled_s
        request = Request(self._added, batch, length, context, sampling, int(seed), int(read_seed), *at)
        while is_full(self._schedule, request, self._max_waiting, self._max_waiting_bytes):
            self.step()
        handle = Handle(self, request.number)
        self._handles[request.number] = handle
        self._schedule, self._added = enqueue(self._schedule, request), self._added + 1
        return handle

    def read(self, text: Any, *, seed: int = 0, max_new_tokens: int | None = None, **texts: Any) -> Context:
        """Read a prompt now, for any number of questions: a text, token ids, or the path of a saved cache.

        Args:
            text: the prompt.
            seed: of methods that draw.
            max_new_tokens: of the answers; it counts in budgets of base "prompt+new". By default 64, or as many as
                the engine has room for. A request for more or fewer reads the prompt again with its own budget.
            texts: as in `add`; questions to the context are then in its chat.

        Raises ValueError as `add`, and for a saved cache that does not fit; MemoryError if memory does not suffice.
        """
        check_settings(Sampling(), seed)
        number, self._read_count = self._read_count, self._read_count + 1
        with self._at_work():
            return self._prefiller.read(number, text, int(seed), max_new_tokens, **texts)

    def save(self, context: Context, path: str | os.PathLike[str], *, origin: Mapping[str, Any] | None = None) -> None:
        """Write a context to a file that `read` and `add` of another process take, with the same model and method.

        `origin` is as in `save_cache`.
        """
        check_own(context, self._contexts)
        with self._at_work():
            cache = self._prefiller.of_context(context, context.max_new_tokens).cache
            saving.save(path, cache, self.model.config, self.method, origin=origin)

    def drop(self, context: Context) -> None:
        """Forget what is held of a context; asked again, it is read again. Raises ValueError as `save`."""
        check_own(context, self._contexts)
        self._contexts.drop(context.number)

    def close(self) -> None:
        """Cancel all requests, forget all contexts and remove their files."""
        for handle in tuple(self._handles.values()):
            handle.cancel()
        self._contexts.close()

    def stream(self) -> Iterator[tuple[Handle, str]]:
        """Pieces of text as they come, with their handles, until all requests are done; more may be added meanwhile.

        A model without tokenizer has none.
        """
        pieces: deque[tuple[Handle, str]] = deque()
        self._listeners.append(pieces)
        try:
            while pieces or self._handles:
                if not pieces:
                    self.step()
                while pieces:
                    yield pieces.popleft()
        finally:
            self._listeners = [listener for listener in self._listeners if listener is not pieces]

    def run(self) -> None:
        """Work until all requests are done."""
        while self._handles:
            self.step()

    def stats(self) -> EngineStats:
        """How the engine does."""
        sizes = len(self._schedule.running), len(self._schedule.waiting), len(self._schedule.active)
        return engine_stats(self._counters, sizes, self._contexts.counts(), self._contexts.nbytes(), self.memory)

    def step(self) -> None:
        """Let requests enter, decode for all slots at most `SEGMENT` tokens, and let those that have ended leave."""
        with self._at_work():
            self._admit_waiting()
            if active := self._schedule.active:
                self._decode(active)

    # --- stages of a step ---

    def _admit_waiting(self) -> None:
        """Requests that wait enter free slots, with their questions and first tokens."""
        entered = 0
        while requests := next_requests(self._schedule, self._entering - entered):
            entered += len(requests)
            placed = zip(requests, self._schedule.free, strict=False)
            new = [slot for request, slot in placed if self._admit(request, slot)]
            self._append_questions(new)
            self._sample_first(new)

    def _admit(self, request: Request, slot: int) -> bool:
        """Put a request's cache into a slot; False if its prompt cannot be read."""
        try:
            if request.context is None:
                result = self._prefiller.of_prompt(request, self._schedule.waiting[1:2])
            else:
                result = self._prefiller.of_context(request.context, request.batch.max_new_tokens)
            self._slots = runner.insert(
                self.method, self._slots, result.cache, result.logits, np.asarray(slot, np.int32)
            )
        except (ValueError, MemoryError) as error:
            self._finish(request.number, "failed", error)
            return False
        self._schedule = place(self._schedule, slot, RunningSequence(request, seed_words(request.seed), result.rows))
        self._handles[request.number].state = "active"
        return True

    def _append_questions(self, new: list[int]) -> None:
        """Feed the questions of new slots, as many tokens at a time as `generate` would."""
        requests = {slot: self._schedule.sequence(slot).request for slot in new}
        asked = {slot: (request.question, request.batch.step_tokens) for slot, request in requests.items()}
        width = self._layout.limits.step_tokens
        if not self._questions_compiled and any(question for question, _ in asked.values()):
            runner.compile_questions(self.model, self.method, self._slots, width)
            self._questions_compiled = True
        self._slots = runner.append_questions(self.model, self.method, self._slots, asked, width)

    def _sample_first(self, new: list[int]) -> None:
        """Draw the first tokens of new slots."""
        if not new:
            return
        mask = np.isin(np.arange(len(self._schedule.running)), new)
        self._slots, tokens = runner.sample_first(
            self._slots, next_sampling(self._schedule.running, self.model.config.vocab_size), mask
        )
        tokens, now = fetch(tokens), self._now()
        for slot in new:
            self._counters = with_first_token(self._counters, now - self._schedule.sequence(slot).request.added_s)
            self._emit(slot, [int(tokens[slot])], now)

    def _decode(self, active: tuple[int, ...]) -> None:
        """One call of the decode program, which ends early where a slot ends for which somebody waits."""
        running, config = self._schedule.running, self.model.config
        left = np.asarray([0 if sequence is None else sequence.left for sequence in running], np.int32)
        self._slots, tokens, steps = runner.decode(
            self.model.params,
            config,
            self.method,
            self._slots,
            next_sampling(running, config.vocab_size),
            np.isin(np.arange(len(running)), active),
            left,
            np.asarray(min(SEGMENT, int(left.max())), np.int32),
            np.asarray(len(active) if self._schedule.waiting else 1, np.int32),
            eos_ids=config.eos_ids,
            steps=SEGMENT,
        )
        tokens, steps = fetch((tokens, steps))
        self._count(steps=int(steps), active_steps=int((tokens != -1).sum()))
        now = self._now()
        for slot in active:
            self._emit(slot, tokens[slot].tolist(), now)

    def _emit(self, slot: int, new: list[int], now: float) -> None:
        """A slot's new tokens: what can be shown of them, and whether they are the last ones."""
        model, before = self.model, self._schedule.sequence(slot)
        request, sequence = before.request, with_tokens(before, new, model.config.eos_ids, now)
        tokens = list(sequence.tokens)
        try:
            check_tokens(model, self.method, request, tokens)
            stopped = shorten(model.tokenizer, tokens, request.batch.stops)
            sequence = replace(sequence, tokens=tuple(tokens), ended=sequence.ended or stopped)
            sequence = replace(sequence, shown=self._decode_text(sequence))
            self._count(new_tokens=len(sequence.tokens) - len(before.tokens))
            self._schedule = place(self._schedule, slot, sequence)
            if sequence.ended:
                self._finish(request.number, "finished", self._result(slot, sequence, now))
        except ValueError as error:
            self._finish(request.number, "failed", error)

    def _decode_text(self, sequence: RunningSequence) -> str:
        handle, listeners = self._handles[sequence.request.number], self._listeners

        def pass_on(_: int, text: str) -> None:
            for listener in listeners:
                listener.append((handle, text))

        tokenizer = self.model.tokenizer
        heard = pass_on if listeners and tokenizer is not None else None
        tokens, stops = list(sequence.tokens), sequence.request.batch.stops
        return show(tokenizer, 0, tokens, sequence.shown, stops, sequence.ended, heard)

    def _result(self, slot: int | None, sequence: RunningSequence, now: float) -> Result:
        """The result of a request; one that never had a slot has said nothing."""
        looked_at = None
        if slot is not None and not self.method.forgets:
            with self._on_mesh():
                looked_at = runner.statistics_of_slot(self._slots.cache, slot)
        return result_of(self.model, sequence, self._layout, looked_at, now, self._compiled_s)

    # --- small parts ---

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return on_mesh(self.model.mesh, self.model.config.num_kv_heads)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        begin = time.perf_counter()
        doing = f"serving {len(self._schedule.running)} slots of {self._layout.limits.max_tokens:,} tokens"
        explained = out_of_memory_explained(doing, uses_host=self.method.holds == "host")
        with own_settings(), compilation() as total, self._on_mesh(), explained:
            self._compiling = total
            try:
                yield
            finally:
                busy_s = time.perf_counter() - begin
                self._count(busy_s=busy_s, compile_s=total.seconds, programs=total.programs)
                self._compiling = Compilation()

    def _now(self) -> float:
        """Seconds of a clock that stands still while the engine compiles."""
        return time.perf_counter() - self._compiled_s

    @property
    def _compiled_s(self) -> float:
        return self._counters.compile_s + self._compiling.seconds

    def _cancel(self, handle: Handle) -> None:
        if handle.done:
            return
        slot, sequence = find(self._schedule, handle.number)
        self._finish(handle.number, "cancelled", self._result(slot, sequence, self._now()))

    def _finish(self, number: int, state: State, outcome: Result | Exception) -> None:
        """A request leaves, and its slot is free."""
        self._schedule = remove(self._schedule, number)
        self._prefiller.hold_for(self._schedule.waiting[:1])
        handle = self._handles.pop(number)
        handle.state, handle._result = state, outcome
        self._count(**{state: 1})

    def _count(self, **more: float) -> None:
        self._counters = add_counts(self._counters, **more)
