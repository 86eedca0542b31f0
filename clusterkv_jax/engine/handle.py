"""What a caller holds of a request."""

from collections.abc import Callable
from typing import Any, Literal

from typing_extensions import override

from clusterkv_jax.engine.contexts import Context
from clusterkv_jax.engine.outputs import RequestOutput
from clusterkv_jax.engine.scheduler import Key
from clusterkv_jax.generation.results import Result

RequestStatus = Literal["waiting", "active", "finished", "failed", "cancelled"]
# Takes what is new of a request as it comes, or why it has failed.
OnOutput = Callable[[RequestOutput | Exception], None]


class Handle:
    """A request that was added: what `Engine.stream` names, and where its result is.

    Attributes:
        key: its number, and that of its answer.
        on_output: called with what is new of it.
        state: where it stands.
        context: what the answer has left, of a request with `keep` that has come to its end.
        prompt_context: the prompt of a request with `keep_prompt`, until an output has it.
    """

    def __init__(self, core: Any, key: Key, on_output: OnOutput | None = None) -> None:
        self._core, self.key, self.on_output = core, key, on_output
        self.state: RequestStatus = "waiting"
        self._outcome: Result | Exception | None = None
        self.context: Context | None = None
        self.prompt_context: Context | None = None

    @override
    def __repr__(self) -> str:
        return f"Handle({self.number}, {self.state})"

    @property
    def number(self) -> int:
        """Of the request."""
        return self.key[0]

    @property
    def done(self) -> bool:
        """Whether the request has come to an end, of whatever kind."""
        return self._outcome is not None

    def cancel(self) -> None:
        """End the request now; its slot is free. Its result is what it has said so far. Later, nothing happens."""
        self._core.cancel(self.key)

    def result(self) -> Result:
        """What `generate` returns for this prompt alone; the engine works until it is there.

        Raises the error of a request that failed: a ValueError or MemoryError of one sentence.
        """
        while self._outcome is None:
            self._core.step()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def finish(self, state: RequestStatus, outcome: Result | Exception, context: Context | None) -> None:
        """What the request has come to, and the context that its answer has left."""
        self.state, self._outcome, self.context = state, outcome, context
