"""`Engine`: requests in, pieces of text and results out. Its programs are in `slots`, its rules in `board`."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.batch import QUESTION_STEP, Batch, bucket, padded
from clusterkv_jax.cache import KVCache, nbytes, occupancy, slot_bytes
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.checks import check_counts
from clusterkv_jax.decoding import check_prompts, prefill
from clusterkv_jax.diagnosis import check_finite
from clusterkv_jax.engine import slots as programs
from clusterkv_jax.engine.board import Board, Order, Seat, joined, longer, next_orders, seated, without
from clusterkv_jax.engine.contexts import Context, Place, Reading, Shelf
from clusterkv_jax.engine.draws import Draws, draws_of, key_words
from clusterkv_jax.engine.memory import MemoryPlan, check_memory, device_limit, memory_plan, tree_bytes
from clusterkv_jax.engine.orders import (
    Limits,
    check_settings,
    context_batch,
    is_file,
    prompt_batch,
    read_file,
    request_of_batch,
)
from clusterkv_jax.engine.tally import EngineStats, Tally, shown_stats
from clusterkv_jax.errors import out_of_memory_explained, shown
from clusterkv_jax.host_store import host_bytes, traffic
from clusterkv_jax.methods import Full, Method
from clusterkv_jax.methods.families.recall import recalled_rows
from clusterkv_jax.methods.request import request_of_model
from clusterkv_jax.presets import completed
from clusterkv_jax.programs import compilation
from clusterkv_jax.results import Result, Stats
from clusterkv_jax.sampling import NOT_FINITE, Sampling
from clusterkv_jax.sharding import fetch
from clusterkv_jax.texts import cut, decode, shorten_at_stop, show

State = Literal["waiting", "active", "finished", "failed", "cancelled"]
# Steps of one call of the decode program; between two, requests enter and leave.
SEGMENT = 32
# Room in each place for contexts that nobody limits: on the device that of so many slots.
DEVICE_CONTEXTS, HOST_BYTES, DISK_BYTES = 2, 8 * 2**30, 2**62


class Handle:
    """A request that was added: what `Engine.stream` names, and where its result is."""

    def __init__(self, engine: "Engine", number: int) -> None:
        self._engine, self.number = engine, number
        self.state: State = "waiting"
        self._outcome: Result | Exception | None = None

    def __repr__(self) -> str:
        return f"Handle({self.number}, {self.state})"

    @property
    def done(self) -> bool:
        """Whether the request has come to an end, of whatever kind."""
        return self._outcome is not None

    def cancel(self) -> None:
        """End the request now; its slot is free. Its result is what it has said so far. Later, nothing happens."""
        self._engine._cancel(self)

    def result(self) -> Result:
        """What `generate` returns for this prompt alone; the engine works until it is there.

        Raises the error of a request that failed: a ValueError or MemoryError of one sentence.
        """
        while self._outcome is None:
            self._engine.step()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Engine:
    """Serves many requests with one model and one method: they enter and leave the slots of one compiled program.

    Everything static is decided here. A request waits until a slot is free; those that came first enter first. Its
    prompt is read alone, compressed, and put into the slot; all slots decode together. Greedy tokens in float32 are
    those of `generate` for the prompt alone, and so are drawn ones of the same seed. One thread uses an engine, which
    works while `stream`, `run` or `Handle.result` is called.

    Args:
        model: from `load`, on one device.
        method: what is kept of the prompts; `Full()` by default.
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

    Raises:
        ValueError: one sentence, for numbers that are not possible, a model on several devices, and what does not fit
            `device_bytes`.
    """

    def __init__(
        self,
        model: Model,
        *,
        method: Method | None = None,
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
    ) -> None:
        method = Full() if method is None else method
        if not isinstance(method, Method):
            raise ValueError(f"method must be an object such as Full(), got {shown(method)}.")
        if model.mesh is not None and model.mesh.size > 1:
            raise ValueError(f"An engine must have its model on one device, got a mesh of {model.mesh.size}.")
        entering = slots if questions_per_step is None else questions_per_step
        check_counts(1, slots=slots, reserve=reserve, questions_per_step=entering, max_waiting=max_waiting)
        check_counts(2, max_tokens=max_tokens)
        bytes_limits = {"context_host_bytes": context_host_bytes, "context_disk_bytes": context_disk_bytes}
        bytes_limits |= {"max_waiting_bytes": max_waiting_bytes, "context_bytes": context_bytes or 0}
        check_counts(0, 2**62, device_bytes=device_bytes or 0, **bytes_limits)
        if context_folder is not None and not os.path.isdir(context_folder):
            raise ValueError(f"context_folder must be a folder that exists, got {shown(os.fspath(context_folder))}.")
        self.model, self.method = model, completed(model, method)
        self.max_waiting, self.max_waiting_bytes = max_waiting, max_waiting_bytes
        self._entering, self._prefill_chunk = entering, prefill_chunk
        max_tokens = min(max_tokens, model.config.max_positions)
        reserve = min(reserve, max_tokens)
        self.limits = Limits(max_tokens, reserve, min(QUESTION_STEP, bucket(reserve, 16)))
        width = min(bucket(max_tokens, 64), model.config.max_positions)
        sizes = {"reserve": reserve, "step_tokens": self.limits.step_tokens}
        dtype, lengths = model.params["embed"].dtype, np.arange(1, width + 1)
        request = request_of_model(model.config, dtype, lengths, max_new_tokens=reserve, **sizes)
        check_prompts(model.config, self.method, replace(request, lengths=lengths[:1]), np.empty(0, np.int64))
        self._plans = programs.slot_plans(self.method, request)
        shapes = model.params, model.config, self.method, self._plans, width
        self._one = programs.template(*shapes, **sizes, prefill_chunk=prefill_chunk)
        shelf_bytes = DEVICE_CONTEXTS * tree_bytes(self._one) if context_bytes is None else context_bytes
        self.memory: MemoryPlan = memory_plan(model.params, model.config, self._one, slots, width, shelf_bytes)
        check_memory(self.memory, device_limit() if device_bytes is None else device_bytes, slots)
        places: dict[Place, int] = {"device": shelf_bytes, "host": context_host_bytes}
        places["disk"] = 0 if context_folder is None else context_disk_bytes
        self._shelf = Shelf(model.config, self.method, places, context_folder)
        self._slots = programs.empty(*self._one, slots, self.method)
        self._board = Board((), (None,) * slots)
        self._handles: dict[int, Handle] = {}
        self._listeners: list[deque[tuple[Handle, str]]] = []
        self._tally, self._added, self._read_count = Tally(), 0, 0

    # --- what a caller says ---

    def add(
        self,
        prompt: Any,
        question: Any = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> Handle:
        """A request behind those that wait.

        Args:
            prompt: a text, token ids, a `Context` of this engine, or the path (`pathlib.Path`) of a saved cache.
            question: a text or token ids, fed after the prompt has been compressed.
            max_new_tokens, sampling, stop, seed: as in `generate`.

        Raises ValueError at once for what cannot be served; what goes wrong later is raised by the handle's `result`.
        """
        sampling = Sampling() if sampling is None else sampling
        check_settings(sampling, seed)
        context = self.read(prompt) if is_file(prompt) else prompt if isinstance(prompt, Context) else None
        sizes = {"max_new_tokens": max_new_tokens, "stop": stop, "prefill_chunk": self._prefill_chunk}
        if context is None:
            batch = prompt_batch(self.model, self.method, self.limits, prompt, question, **sizes)
            length = len(batch.texts[0])
        else:
            self._check_own(context)
            batch, length = context_batch(self.model, self.limits, context, question, **sizes), context.length
        at = time.perf_counter(), self._tally.compile_s
        order = Order(self._added, batch, length, context, sampling, int(seed), tuple(stop), *at)
        while self._is_full(order):
            self.step()
        handle = Handle(self, order.number)
        self._handles[order.number] = handle
        self._board, self._added = joined(self._board, order), self._added + 1
        return handle

    def read(self, text: Any, *, seed: int = 0, max_new_tokens: int = 64) -> Context:
        """Read a prompt now, for any number of questions: a text, token ids, or the path of a saved cache.

        Args:
            text: the prompt.
            seed: of methods that draw.
            max_new_tokens: of the answers; it counts in budgets of base "prompt+new".

        Raises ValueError as `add`, and for a saved cache that does not fit; MemoryError if memory does not suffice.
        """
        check_settings(Sampling(), seed)
        number, self._read_count = self._read_count, self._read_count + 1
        with self._at_work():
            if is_file(text):
                path, length, reading = read_file(text, self.model, self.method, self._one[0], self.limits)
                context = Context(number, (), length, path, 0, max_new_tokens)
            else:
                sizes = {"max_new_tokens": max_new_tokens, "prefill_chunk": self._prefill_chunk}
                batch = prompt_batch(self.model, self.method, self.limits, text, None, **sizes)
                tokens = tuple(batch.texts[0])
                context = Context(number, tokens, len(tokens), None, int(seed), max_new_tokens)
                reading = self._read(batch, int(seed))
            self._shelf.put(number, reading)
        return context

    def save(self, context: Context, path: str | os.PathLike[str]) -> None:
        """Write a context to a file that `read` and `add` of another process take, with the same model and method."""
        self._check_own(context)
        saving.save(path, self._reading(context).cache, self.model.config, self.method)

    def drop(self, context: Context) -> None:
        """Forget what is held of a context; asked again, it is read again."""
        self._shelf.drop(context.number)

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
        counts: Any = self._shelf.counts(), self._shelf.nbytes()
        sizes = len(self._board.seats), len(self._board.waiting), len(self._board.active)
        return shown_stats(self._tally, *sizes, *counts, self.memory)

    def step(self) -> None:
        """Let requests enter, decode for all slots at most `SEGMENT` tokens, and let those that have ended leave."""
        with self._at_work():
            self._enter()
            if active := self._board.active:
                self._decode(active)

    # --- stages of a step ---

    def _enter(self) -> None:
        """Requests that wait enter free slots, with their questions and first tokens."""
        entered = 0
        while orders := next_orders(self._board, self._entering - entered):
            entered += len(orders)
            new = [slot for order, slot in zip(orders, self._board.free, strict=False) if self._sit(order, slot)]
            self._ask(new)
            self._start(new)

    def _sit(self, order: Order, slot: int) -> bool:
        """Put a request's cache into a slot; False if its prompt cannot be read."""
        try:
            if order.context is None:
                reading = self._read(order.batch, order.seed)
            else:
                reading = self._reading(order.context)
            logits = self._slots.logits[:1] if reading.logits is None else reading.logits
            self._slots = programs.insert(self._slots, reading.cache, logits, jnp.int32(slot))
        except (ValueError, MemoryError) as error:
            self._end(order.number, "failed", error)
            return False
        self._board = seated(self._board, slot, Seat(order, key_words(order.seed), reading.kept_rows))
        self._handles[order.number].state = "active"
        return True

    def _ask(self, new: list[int]) -> None:
        """Feed the questions of new slots, each as many tokens at a time as `generate` would."""
        rest = {slot: self._seat(slot).order.question for slot in new}
        steps = {slot: self._seat(slot).order.batch.step_tokens for slot in new}
        while any(rest.values()):
            texts = [rest.get(slot, [])[: steps.get(slot, 0)] for slot in range(len(self._board.seats))]
            tokens = jnp.asarray(padded(texts, self.limits.step_tokens))
            counts = jnp.asarray([len(text) for text in texts], jnp.int32)
            model = self.model
            self._slots = programs.ask(model.params, model.config, self.method, self._slots, tokens, counts)
            rest = {slot: text[steps[slot] :] for slot, text in rest.items()}

    def _start(self, new: list[int]) -> None:
        """Draw the first tokens of new slots."""
        if not new:
            return
        mask = np.isin(np.arange(len(self._board.seats)), new)
        self._slots, tokens = programs.start(self._slots, self._draws(), mask)
        tokens, now = fetch(tokens), time.perf_counter()
        for slot in new:
            waited = now - self._seat(slot).order.added_s
            self._count(firsts=1, ttft_s=waited)
            self._tally = replace(self._tally, longest_ttft_s=max(self._tally.longest_ttft_s, waited))
            self._say(slot, tokens[slot : slot + 1], now)

    def _decode(self, active: tuple[int, ...]) -> None:
        """One call of the decode program, which ends early where a slot ends for which somebody waits."""
        seats, config = self._board.seats, self.model.config
        left = np.asarray([0 if seat is None else seat.left for seat in seats], np.int32)
        self._slots, tokens, steps = programs.run(
            self.model.params,
            config,
            self.method,
            self._slots,
            self._draws(),
            np.isin(np.arange(len(seats)), active),
            left,
            np.int32(min(SEGMENT, int(left.max()))),
            np.int32(len(active) if self._board.waiting else 1),
            eos_ids=config.eos_ids,
            steps=SEGMENT,
        )
        tokens, steps = fetch((tokens, steps))
        self._count(steps=int(steps), active_steps=int((tokens != -1).sum()))
        now = time.perf_counter()
        for slot in active:
            self._say(slot, tokens[slot], now)

    def _say(self, slot: int, new: Any, now: float) -> None:
        """A slot's new tokens: what can be shown of them, and whether they are the last ones."""
        model, before = self.model, self._seat(slot)
        order, seat = before.order, longer(before, new, model.config.eos_ids, now)
        tokens = list(seat.tokens)
        try:
            if NOT_FINITE in tokens:
                self._check_finite(order, tokens)
            stopped = shorten_at_stop(model, tokens, order.stop)
            seat = replace(seat, tokens=tuple(tokens), ended=seat.ended or stopped)
            seat = replace(seat, shown=self._show(seat))
            self._count(new_tokens=len(seat.tokens) - len(before.tokens))
            self._board = seated(self._board, slot, seat)
            if seat.ended:
                self._end(order.number, "finished", self._result(slot, seat, now))
        except ValueError as error:
            self._end(order.number, "failed", error)

    def _show(self, seat: Seat) -> str:
        handle, listeners = self._handles[seat.order.number], self._listeners

        def pass_on(_: int, text: str) -> None:
            for listener in listeners:
                listener.append((handle, text))

        heard = pass_on if listeners and self.model.tokenizer is not None else None
        return show(self.model, 0, list(seat.tokens), seat.shown, seat.order.stop, seat.ended, heard)

    def _check_finite(self, order: Order, tokens: list[int]) -> None:
        if order.context is not None and order.context.file is not None:
            raise ValueError(f"The model's logits after the saved cache {order.context.file} are not finite numbers.")
        check_finite(self.model, self.method, order.batch, [tokens])

    def _result(self, slot: int | None, seat: Seat, now: float) -> Result:
        """What `generate` returns; a request that never had a slot has said nothing."""
        model, order, tokens = self.model, seat.order, list(seat.tokens)
        config, one = model.config, self._one[0]
        looked_at = slot is not None and not self.method.forgets
        small = programs.of_slot(self._slots.cache, slot) if looked_at and slot is not None else None
        recalled, union = ([], []) if small is None else recalled_rows(small)
        moved = {"moved_bytes": 0, "cluster_hit_rate": 0.0, "row_hit_rate": 0.0} if small is None else traffic(small)
        heads = config.num_kv_heads * config.num_layers
        stats = Stats(
            ttft_s=max(0.0, seat.first_s - order.added_s) if tokens else 0.0,
            tpot_s=(now - seat.first_s) / (len(tokens) - 1) if len(tokens) > 1 else 0.0,
            compile_s=self._tally.compile_s - order.compile_s,
            kept_rows=seat.kept_rows,
            recalled_rows=recalled,
            union_rows=union,
            cache_bytes=nbytes(one),
            host_bytes=host_bytes(one),
            **moved,
            full_cache_bytes=slot_bytes(one) * (order.batch.width + order.batch.reserve) * heads,
            prompt_tokens=[order.prompt_tokens],
            question_tokens=[len(order.question)],
            new_tokens=[len(tokens)],
        )
        return Result([cut(decode(model, tokens), order.stop)], [tokens], stats)

    # --- small parts ---

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        begin = time.perf_counter()
        doing = f"serving {len(self._board.seats)} slots of {self.limits.max_tokens:,} tokens"
        with compilation() as total, out_of_memory_explained(doing, uses_host=self.method.holds == "host"):
            try:
                yield
            finally:
                busy_s = time.perf_counter() - begin
                self._count(busy_s=busy_s, compile_s=total.seconds, programs=total.programs)

    def _read(self, batch: Batch, seed: int) -> Reading:
        """Prefill of one prompt, with the slots' plans and the budgets that `generate` would give it."""
        model, key = self.model, jax.random.key(seed)
        request = request_of_batch(model, batch)
        cache, logits = prefill(
            model.params,
            model.config,
            self.method,
            jnp.asarray(padded(batch.texts, batch.width)),
            jnp.asarray([len(batch.texts[0])], jnp.int32),
            max_new_tokens=request.max_new_tokens,
            reserve=request.reserve,
            step_tokens=request.step_tokens,
            prefill_chunk=self._prefill_chunk,
            plans=self._plans,
            key=key,
        )
        return Reading(cache, logits, occupancy(cache))

    def _reading(self, context: Context) -> Reading:
        """What was read of a context, wherever it is; read again where nothing is left of it."""
        if (reading := self._shelf.get(context.number)) is not None:
            return reading
        if context.file is not None:
            reading = read_file(context.file, self.model, self.method, self._one[0], self.limits)[2]
        else:
            sizes = {"max_new_tokens": context.max_new_tokens, "prefill_chunk": self._prefill_chunk}
            text = list(context.tokens)
            reading = self._read(prompt_batch(self.model, self.method, self.limits, text, None, **sizes), context.seed)
        self._shelf.put(context.number, reading)
        return reading

    def _draws(self) -> Draws:
        """How each slot draws its next token."""
        seats = self._board.seats
        nothing = np.zeros_like(key_words(0))
        keys = [nothing if seat is None else seat.key for seat in seats]
        samplings = [Sampling() if seat is None else seat.order.sampling for seat in seats]
        numbers = [0 if seat is None else len(seat.tokens) for seat in seats]
        return draws_of(samplings, keys, numbers, self.model.config.vocab_size)

    def _seat(self, slot: int) -> Seat:
        seat = self._board.seats[slot]
        assert seat is not None
        return seat

    def _is_full(self, order: Order) -> bool:
        waiting = self._board.waiting
        nbytes = sum(other.waiting_bytes for other in waiting) + order.waiting_bytes
        return bool(waiting) and (len(waiting) >= self.max_waiting or nbytes > self.max_waiting_bytes)

    def _check_own(self, context: Any) -> None:
        if not isinstance(context, Context) or context.number >= self._read_count:
            raise ValueError(f"context must be one that this engine has read, got {shown(context)}.")

    def _cancel(self, handle: Handle) -> None:
        if handle.done:
            return
        slots = [slot for slot in self._board.active if self._seat(slot).order.number == handle.number]
        waiting = [Seat(order, None, []) for order in self._board.waiting if order.number == handle.number]
        slot, seat = (slots[0], self._seat(slots[0])) if slots else (None, waiting[0])
        self._end(handle.number, "cancelled", self._result(slot, seat, time.perf_counter()))

    def _end(self, number: int, state: State, outcome: Result | Exception) -> None:
        """A request leaves, and its slot is free."""
        self._board = without(self._board, number)
        handle = self._handles.pop(number)
        handle.state, handle._outcome = state, outcome
        self._count(**{state: 1})

    def _count(self, **more: float) -> None:
        now = self._tally
        self._tally = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})


__all__ = ["Engine", "Handle", "KVCache"]
