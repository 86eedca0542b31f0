"""One engine over several processes: process 0 is asked, and the others' engines make the same calls as its own.

What an engine runs depends on its calls and their order alone, so that the programs of all processes meet.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
from typing_extensions import override

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.engine import Engine
from clusterkv_jax.engine.handle import Handle, OnOutput
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.engine.requests import Request

Tell = Callable[[str], None]
Hear = Callable[[], str]


class Call(msgspec.Struct, omit_defaults=True):
    """A call of an engine; `resume` ends a pause within one, and `close` is the last."""

    name: Literal["submit", "cancel", "cancel_all", "step", "read", "drop", "resume", "close"]
    request_id: int = 0
    context: int | None = None
    tokens: list[int] = []
    question: list[int] | None = None
    params: SamplingParams = SamplingParams()
    seed: int = 0
    stream: bool = False
    max_new_tokens: int | None = None


class LeadingEngine(Engine):
    """The engine of process 0, which tells the others of its calls before it makes them.

    It takes token ids, and neither grammars nor answers whose caches are kept: all contexts are on the device.
    """

    def __init__(self, model: Model, tell: Tell, **options: Any) -> None:
        super().__init__(model, **_options(options))
        # Held until they are dropped: when a context is garbage differs from process to process.
        self._tell_others, self._held = tell, dict[int, Context]()
        self.on_pause(lambda: None)

    @override
    def request(self, prompt: Any, question: Any = None, **options: Any) -> Request:
        if options.get("allowed_tokens") is not None:
            raise ValueError("An answer of a schema, and a call that must be made, need a server of one process.")
        own: dict[str, Any] = {**options, "keep": False}
        return super().request(prompt, question, **own)

    @override
    def submit(self, request: Request, on_output: OnOutput | None = None) -> list[Handle]:
        context = None if request.context is None else request.context.number
        tokens = [] if request.context is not None else request.batch.texts[0]
        question = request.question if request.batch.questions else None
        how: Any = {"params": request.params, "seed": request.read_seed, "stream": request.stream}
        self._tell(Call("submit", request.request_id, context, tokens, question, **how))
        return super().submit(request, on_output)

    @override
    def cancel(self, request_id: int) -> None:
        self._tell(Call("cancel", request_id))
        super().cancel(request_id)

    @override
    def cancel_all(self) -> None:
        self._tell(Call("cancel_all"))
        super().cancel_all()

    @override
    def step(self) -> None:
        self._tell(Call("step"))
        super().step()

    @override
    def read(self, text: Any, *, seed: int = 0, max_new_tokens: int | None = None, **texts: Any) -> Context:
        self._tell(Call("read", tokens=list(text), seed=seed, max_new_tokens=max_new_tokens))
        context = super().read(text, seed=seed, max_new_tokens=max_new_tokens, **texts)
        self._held[context.number] = context
        return context

    @override
    def drop(self, context: Context) -> None:
        self._tell(Call("drop", context=context.number))
        super().drop(self._held.pop(context.number, context))

    @override
    def compact(self, context: Context) -> Context:
        raise ValueError("To compact a context needs an engine of one process.")

    @override
    def on_pause(self, function: Callable[[], None]) -> None:
        def pause() -> None:
            function()
            self._tell(Call("resume"))

        super().on_pause(pause)

    @override
    def close(self) -> None:
        super().close()
        self._tell(Call("close"))

    def _tell(self, call: Call) -> None:
        self._tell_others(msgspec.json.encode(call).decode())


def follow(model: Model, hear: Hear, **options: Any) -> None:
    """Make the calls of the leading engine, which has the same options, until it is closed."""
    engine, contexts = Engine(model, **_options(options)), dict[int, Context]()

    def calls_until(last: str) -> None:
        while (call := msgspec.json.decode(hear(), type=Call)).name != last:
            with suppress(ValueError, MemoryError):  # the caller of process 0 has it
                _make(engine, contexts, call)

    engine.on_pause(partial(calls_until, "resume"))
    calls_until("close")
    engine.close()


def _make(engine: Engine, contexts: dict[int, Context], call: Call) -> None:
    match call.name:
        case "submit":
            prompt = call.tokens if call.context is None else contexts[call.context]
            request = engine.request(prompt, call.question, params=call.params, stream=call.stream)
            engine.submit(replace(request, request_id=call.request_id, read_seed=call.seed))
        case "cancel":
            engine.cancel(call.request_id)
        case "read":
            context = engine.read(call.tokens, seed=call.seed, max_new_tokens=call.max_new_tokens)
            contexts[context.number] = context
        case "drop" if call.context is not None:
            engine.drop(contexts.pop(call.context))
        case "cancel_all":
            engine.cancel_all()
        case "step":
            engine.step()


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Arrays of several processes lie in no process's own memory, and in no file of it."""
    if options.get("context_folder") is not None:
        raise ValueError("A context folder needs an engine of one process.")
    return {**options, "context_folder": None, "context_host_bytes": 0}
