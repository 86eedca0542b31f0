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
from clusterkv_jax.engine.outputs import RequestOutput
from clusterkv_jax.engine.params import SamplingParams
from clusterkv_jax.engine.requests import Request

Tell = Callable[[str], None]
Hear = Callable[[], str]


class EngineCall(msgspec.Struct, omit_defaults=True):
    """A call of an engine; `resume` ends a pause within one, and `close` is the last."""

    name: Literal["submit", "cancel", "cancel_all", "step", "read", "compact", "drop", "resume", "close"]
    request_id: int = 0
    context: int | None = None
    tokens: list[int] = []
    question: list[int] | None = None
    params: SamplingParams = SamplingParams()
    seed: int = 0
    stream: bool = False
    keep: bool = False
    max_new_tokens: int | None = None


class LeadingEngine(Engine):
    """The engine of process 0, which tells the others of its calls before it makes them.

    It takes token ids and no grammars; all contexts are on the device. Who waits for a result calls `step` or `run`.
    """

    def __init__(self, model: Model, tell: Tell, **options: Any) -> None:
        super().__init__(model, **_options(options))
        self._tell_others = tell
        # When a context is garbage differs from process to process.
        self._contexts.drops_unreachable = False
        self.on_pause(lambda: None)

    @override
    def request(self, prompt: Any, question: Any = None, **options: Any) -> Request:
        if options.get("allowed_tokens") is not None:
            raise ValueError("An answer of a schema, and a call that must be made, need a server of one process.")
        return super().request(prompt, question, **options)

    @override
    def submit(self, request: Request, on_output: OnOutput | None = None) -> list[Handle]:
        context = None if request.context is None else request.context.number
        tokens = [] if request.context is not None else request.batch.texts[0]
        question = request.question if request.batch.questions else None
        how: Any = {"params": request.params, "seed": request.read_seed, "stream": request.stream}
        how["keep"] = request.keep
        self._tell(EngineCall("submit", request.request_id, context, tokens, question, **how))
        return super().submit(request, on_output)

    @override
    def cancel(self, request_id: int) -> None:
        self._tell(EngineCall("cancel", request_id))
        super().cancel(request_id)

    @override
    def cancel_all(self) -> None:
        self._tell(EngineCall("cancel_all"))
        super().cancel_all()

    @override
    def step(self) -> None:
        self._tell(EngineCall("step"))
        super().step()

    @override
    def read(self, text: Any, *, seed: int = 0, max_new_tokens: int | None = None, **texts: Any) -> Context:
        self._tell(EngineCall("read", tokens=list(text), seed=seed, max_new_tokens=max_new_tokens))
        return super().read(text, seed=seed, max_new_tokens=max_new_tokens, **texts)

    @override
    def drop(self, context: Context) -> None:
        self._tell(EngineCall("drop", context=context.number))
        super().drop(context)

    @override
    def compact(self, context: Context) -> Context:
        self._tell(EngineCall("compact", context=context.number))
        return super().compact(context)

    @override
    def on_pause(self, function: Callable[[], None]) -> None:
        def pause() -> None:
            function()
            self._tell(EngineCall("resume"))

        super().on_pause(pause)

    @override
    def close(self) -> None:
        super().close()
        self._tell(EngineCall("close"))

    def _tell(self, call: EngineCall) -> None:
        garbage = self._contexts.unreachable
        while garbage:
            number = garbage.popleft()
            self._send(EngineCall("drop", context=number))
            self._contexts.drop(number)
        self._send(call)

    def _send(self, call: EngineCall) -> None:
        self._tell_others(msgspec.json.encode(call).decode())


def follow(model: Model, hear: Hear, **options: Any) -> None:
    """Make the calls of the leading engine, which has the same options, until it is closed."""
    engine = FollowingEngine(model, **_options(options))

    def calls_until(last: str) -> None:
        while (call := msgspec.json.decode(hear(), type=EngineCall)).name != last:
            with suppress(ValueError, MemoryError):  # the caller of process 0 has it
                engine.make(call)

    engine.on_pause(partial(calls_until, "resume"))
    calls_until("close")
    engine.close()


class FollowingEngine(Engine):
    """The engine of another process. It holds each context until it is told to drop it."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(model, **options)
        self.held = dict[int, Context]()

    def make(self, call: EngineCall) -> None:
        """Make a call of the leading engine."""
        match call.name:
            case "submit":
                prompt = call.tokens if call.context is None else self.held[call.context]
                how: Any = {"params": call.params, "stream": call.stream, "keep": call.keep}
                request = self.request(prompt, call.question, **how)
                self.submit(replace(request, request_id=call.request_id, read_seed=call.seed), self._hold_answer)
            case "cancel":
                self.cancel(call.request_id)
            case "read":
                self._hold(self.read(call.tokens, seed=call.seed, max_new_tokens=call.max_new_tokens))
            case "compact" if call.context is not None:
                self._hold(self.compact(self.held[call.context]))
            case "drop" if call.context is not None:
                self._contexts.drop(call.context)
                self.held.pop(call.context, None)
            case "cancel_all":
                self.cancel_all()
            case "step":
                self.step()

    def _hold(self, context: Context) -> None:
        self.held[context.number] = context

    def _hold_answer(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, RequestOutput) and output.context is not None:
            self._hold(output.context)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Arrays of several processes lie in no process's own memory, and in no file of it."""
    if options.get("context_folder") is not None:
        raise ValueError("A context folder needs an engine of one process.")
    return {**options, "context_folder": None, "context_host_bytes": 0}
