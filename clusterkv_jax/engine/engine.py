"""`Engine`: requests in, pieces of text and results out. `core` is its loop, `runner` its programs on the device."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from clusterkv_jax import saving
from clusterkv_jax.budget import Budget
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import Context, ContextStore, Place, check_own
from clusterkv_jax.engine.core import EngineCore
from clusterkv_jax.engine.handle import Handle, OnOutput
from clusterkv_jax.engine.layout import check_arguments, make_layout
from clusterkv_jax.engine.logits import AllowedTokens
from clusterkv_jax.engine.memory import MemoryPlan
from clusterkv_jax.engine.metrics import EngineStats
from clusterkv_jax.engine.params import SamplingParams, params_of
from clusterkv_jax.engine.prefill import SavedContext, is_file
from clusterkv_jax.engine.requests import Request, check_params, check_settings
from clusterkv_jax.generation.batch import Gate, gate_of
from clusterkv_jax.generation.results import Result
from clusterkv_jax.methods import Method
from clusterkv_jax.presets import completed, method_for
from clusterkv_jax.runtime.checks import check_flag
from clusterkv_jax.runtime.prng import spread
from clusterkv_jax.runtime.settings import own_settings
from clusterkv_jax.runtime.sharding import on_mesh
from clusterkv_jax.sampling import Sampling, check_seeds
from clusterkv_jax.text.prompts import Texts, listed

# Most bytes of contexts where nobody says how many.
HOST_BYTES, DISK_BYTES = 8 * 2**30, 2**62
# What `add` passes on to `SamplingParams` by its name.
_OWN = {"frequency_penalty", "ignore_eos", "logit_bias", "logprobs"}
_OWN |= {"min_tokens", "presence_penalty", "repetition_penalty"}


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
        context_bytes: of the contexts on the device; by default two slots' worth, or half of what all else leaves.
        context_host_bytes: of those in the host's memory.
        context_disk_bytes: of those in `context_folder`.
        context_folder: a folder that exists, for contexts that no memory has room for; None leaves them out.
        reading: as in `generate`; and so are the next three. A prompt that never fills its budget is read all the same.
        window: newest tokens that stay.
        chunk: tokens that are read at once.
        prefill_chunk: tokens of a layer that are read at once.
        prefill_tokens: tokens of prompts that are read between two calls of the decode program, if somebody waits for
            each token of a stream. A long prompt is read some layers at a time, so that its result does not change;
            gated, by its chunks.
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
        reading: str = "whole",
        window: int = Gate.window,
        chunk: int = Gate.chunk,
        prefill_chunk: int | None = None,
        prefill_tokens: int = 2048,
        keep_short: bool = False,
    ) -> None:
        named = method_for(model, method, budget=budget, ratio=ratio, tokens=tokens)
        entering = slots if questions_per_step is None else questions_per_step
        counts = {"slots": slots, "reserve": reserve, "questions_per_step": entering, "max_waiting": max_waiting}
        sums = {"context_host_bytes": context_host_bytes, "context_disk_bytes": context_disk_bytes}
        sums |= {"max_waiting_bytes": max_waiting_bytes, "context_bytes": context_bytes or 0}
        sums |= {"device_bytes": device_bytes or 0}
        counts |= {"prefill_tokens": prefill_tokens}
        counts |= {} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}
        check_arguments(named, max_tokens, context_folder, counts, sums)
        self.model, self.method = model, completed(model, named)
        gate = gate_of(reading, window, chunk, prefill_chunk)
        sizes = slots, max_tokens, reserve, context_bytes, device_bytes, prefill_chunk, prefill_tokens, keep_short, gate
        with own_settings(), on_mesh(model.mesh, model.config.num_kv_heads):
            self._layout = make_layout(model, self.method, *sizes)
        places: dict[Place, int] = {"device": self._layout.context_bytes, "host": context_host_bytes}
        places["disk"] = 0 if context_folder is None else context_disk_bytes
        self._contexts = ContextStore(model.config, self.method, places, context_folder)
        limits = {"entering": entering, "most_waiting": (max_waiting, max_waiting_bytes)}
        self._core = EngineCore(model, self.method, self._layout, self._contexts, **limits)
        self._request_ids = itertools.count()

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
                handles.append(self._add(text, question, seed=own_seed, read_seed=seeds[0], **options))
            while not all(handle.done for handle in handles):
                self.step()
                on_stats(self.stats())
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def request(
        self,
        prompt: Any,
        question: Any = None,
        *,
        params: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        stream: bool = False,
        keep: bool = False,
        allowed_tokens: AllowedTokens | None = None,
        **texts: Any,
    ) -> Request:
        """A request, encoded and checked, for `submit`. Any thread may ask for one: nothing of the engine changes.

        Args:
            prompt: a text, token ids, or a `Context` of this engine.
            question: a text or token ids, fed after the prompt has been compressed.
            params: how the answer's tokens are drawn, and where they end.
            stream: whether somebody waits for each token; calls of the decode program are then short.
            keep: whether its cache is left as a context when the answer ends, or is cancelled: prompt, question and
                answer but for its last token, for a question that goes on from there. A stop string may leave none.
            allowed_tokens: called before each token with those of the answer so far, in the thread that works with the
                engine. It returns the tokens that may follow, a bit each in 32-bit words (a grammar's bitmask), or None
                for all; calls of the decode program then have one step.
            texts: as in `add`.

        Raises ValueError at once for what cannot be served.
        """
        return self._request(prompt, question, params, params.seed, stream, keep, allowed_tokens, **texts)

    def submit(self, request: Request, on_output: OnOutput | None = None) -> list[Handle]:
        """Put a request behind those that wait, however many they are; `check_room` asks whether there is room.

        Args:
            request: of this engine.
            on_output: called with a `RequestOutput` after each call of the decode program that has brought tokens, or
                with the error of a request that fails.

        Returns a handle for each of its `params.n` answers.
        """
        return self._core.submit(request, on_output)

    def check_room(self, request: Request, ahead: int = 0) -> None:
        """Raise EngineFull if the queue has no place for a request, with `ahead` others before it."""
        self._core.check_room(request, ahead)

    def on_pause(self, function: Callable[[], None]) -> None:
        """Call a function, which may cancel requests, wherever the engine pauses while it reads a prompt."""
        self._core.on_pause = function

    def cancel(self, request_id: int) -> None:
        """End a request, all of its answers, now. Of one that has ended nothing changes."""
        for key in [key for key in self._core.handles if key[0] == request_id]:
            self._core.cancel(key)

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
        ignore_eos: bool = False,
        min_tokens: int = 0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        keep: bool = False,
        wait: bool = True,
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
            ignore_eos: as in `SamplingParams`, and so are the next six.
            min_tokens: tokens before which nothing ends it.
            frequency_penalty: for each time that a token was said.
            presence_penalty: for a token that was said.
            repetition_penalty: of tokens of the prompt and the answer.
            logit_bias: by token id.
            logprobs: most likely tokens that the result tells log probabilities of, beside those of its tokens.
            keep: as in `request`; the context is the handle's.
            wait: where the queue is full, work until there is room; False raises `EngineFull`.
            texts: `chat`, `system`, `chat_template_kwargs`, `special_tokens` as in `generate`; for a context in `read`.

        Raises ValueError at once for what cannot be served; what goes wrong later is raised by the handle's `result`.
        """
        asked = {
            "max_new_tokens": max_new_tokens,
            "stop": stop,
            "stop_ids": stop_ids,
            "ignore_eos": ignore_eos,
            "min_tokens": min_tokens,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "repetition_penalty": repetition_penalty,
            "logit_bias": logit_bias,
            "logprobs": logprobs,
            "keep": keep,
        }
        return self._add(prompt, question, sampling=sampling, seed=seed, read_seed=seed, wait=wait, **asked, **texts)

    def _add(
        self,
        prompt: Any,
        question: Any,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        read_seed: int,
        wait: bool = True,
        **options: Any,
    ) -> Handle:
        """`add` of a request that is read by another seed than it draws by."""
        sampling = Sampling() if sampling is None else sampling
        check_settings(sampling, seed)
        ends = {"max_tokens": max_new_tokens, "stop": stop, "stop_token_ids": stop_ids}
        own = {name: options.pop(name) for name in _OWN & options.keys()}
        params = params_of(sampling, seed=seed, **ends, **own)
        prompt = self.read(prompt) if is_file(prompt) else prompt
        request = self._request(prompt, question, params, read_seed, **options)
        while wait and self._core.is_full(request):
            self.step()
        self.check_room(request)
        return self.submit(request)[0]

    def _request(
        self,
        prompt: Any,
        question: Any,
        params: SamplingParams,
        read_seed: int,
        stream: bool = False,
        keep: bool = False,
        allowed_tokens: AllowedTokens | None = None,
        **texts: Any,
    ) -> Request:
        """`request` of a prompt that is read by this seed."""
        context, config = prompt if isinstance(prompt, Context) else None, self.model.config
        check_params(params, context, config.vocab_size, keep=check_flag(keep=keep))
        if context is not None:
            check_own(context, self._contexts)
        ends = {"max_new_tokens": params.max_tokens, "stop": params.stop, "stop_ids": params.stop_token_ids}
        batch = self._core.prefiller.batch(prompt, question, **ends, **texts)
        length = len(batch.texts[0]) if context is None else context.length
        own_ends = () if params.ignore_eos else tuple(config.eos_ids)
        how = params, int(read_seed), own_ends, stream, allowed_tokens
        at = self._core.now(), self._core.compiled_s
        return Request(next(self._request_ids), batch, length, context, *how, *at, keep=keep)

    def read(self, text: Any, *, seed: int = 0, max_new_tokens: int | None = None, **texts: Any) -> Context:
        """Read a prompt now, for any number of questions: a text, token ids, or the path of a saved cache.

        Args:
            text: the prompt, or what `load` has loaded.
            seed: of methods that draw.
            max_new_tokens: of the answers; it counts in budgets of base "prompt+new". By default 64, or as many as
                the engine has room for. A request for more or fewer reads the prompt again with its own budget.
            texts: as in `add`; questions to the context are then in its chat.

        Raises ValueError as `add`, and for a saved cache that does not fit; MemoryError if memory does not suffice.
        """
        check_settings(Sampling(), seed)
        with self._core.at_work():
            number = next(self._core.context_numbers)
            return self._core.prefiller.read(number, text, int(seed), max_new_tokens, **texts)

    def save(self, context: Context, path: str | os.PathLike[str], *, origin: Mapping[str, Any] | None = None) -> None:
        """Write a context to a file that `read` and `add` of another process take, with the same model and method.

        `origin` is as in `save_cache`.
        """
        with self._core.at_work():
            self.saver(context, path, origin=origin)()

    def saver(
        self, context: Context, path: str | os.PathLike[str], *, origin: Mapping[str, Any] | None = None
    ) -> Callable[[], None]:
        """What writes a context as it is now, as `save` does, in any thread."""
        check_own(context, self._contexts)
        result = self._contexts.peek(context.number) or self._core.prefiller.held(context)[0]
        known = {"token_ids": list(context.tokens)} if context.answered else {}
        about: Any = {"origin": {**(origin or {}), **known}}
        return partial(saving.save, path, result.cache, self.model.config, self.method, **about)

    def load(self, path: str | os.PathLike[str]) -> SavedContext:
        """A saved cache in memory, for `read`. Any thread may load one. Raises ValueError for one that does not fit."""
        with own_settings(), on_mesh(self.model.mesh, self.model.config.num_kv_heads):
            return self._core.prefiller.saved(path)

    def holds(self, context: Context) -> bool:
        """Whether a context is in memory, so that nothing is read for it. Raises ValueError as `save`."""
        check_own(context, self._contexts)
        return self._contexts.peek(context.number) is not None

    def compact(self, context: Context) -> Context:
        """A context with the rows that its budget leaves of so many tokens, where its method can drop more; nothing is
        read for it. Raises ValueError as `save`, and for a context whose tokens are not known.
        """
        check_own(context, self._contexts)
        if not context.tokens:
            raise ValueError(f"compact needs the tokens of a context, which {context.file} does not hold.")
        with self._core.at_work():
            return self._core.compact(context)

    def rows(self, context: Context) -> tuple[float, int]:
        """What a context holds: rows of a head, on average over all heads, and bytes. Raises ValueError as `save`."""
        check_own(context, self._contexts)
        with self._core.at_work():
            result, _ = self._core.prefiller.held(context)
        return result.mean_rows, result.nbytes

    def drop(self, context: Context) -> None:
        """Forget what is held of a context; asked again, it is read again. Raises ValueError as `save`."""
        check_own(context, self._contexts)
        self._contexts.drop(context.number)

    def close(self) -> None:
        """Cancel all requests, forget all contexts and remove their files."""
        self.cancel_all()
        self._contexts.close()

    def stream(self) -> Iterator[tuple[Handle, str]]:
        """Pieces of text as they come, with their handles, until all requests are done; more may be added meanwhile.

        A model without tokenizer has none.
        """
        pieces: deque[tuple[Handle, str]] = deque()
        self._core.listeners.append(pieces)
        try:
            while pieces or self.busy:
                if not pieces:
                    self.step()
                while pieces:
                    yield pieces.popleft()
        finally:
            listeners = self._core.listeners
            listeners[:] = [listener for listener in listeners if listener is not pieces]

    def run(self) -> None:
        """Work until all requests are done."""
        while self.busy:
            self.step()

    def cancel_all(self) -> None:
        """End all requests now."""
        for key in tuple(self._core.handles):
            self._core.cancel(key)

    def fail_all(self, error: Exception) -> None:
        """End all requests with this error: after one that leaves no slot as it was."""
        for key in tuple(self._core.handles):
            self._core.fail(key, error)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._core.handles)

    def stats(self) -> EngineStats:
        """How the engine does."""
        return self._core.stats()

    def step(self) -> None:
        """Let requests enter, decode for all slots once, and let those that have ended leave."""
        self._core.step()
