"""What a caller holds of a request."""

from typing import Any, Literal

from typing_extensions import override

from clusterkv_jax.generation.results import Result

State = Literal["waiting", "active", "finished", "failed", "cancelled"]


class Handle:
    """A request that was added: what `Engine.stream` names, and where its result is."""

    def __init__(self, engine: Any, number: int) -> None:
        self._engine, self.number = engine, number
        self.state: State = "waiting"
        self._result: Result | Exception | None = None

    @override
    def __repr__(self) -> str:
        return f"Handle({self.number}, {self.state})"

    @property
    def done(self) -> bool:
        """Whether the request has come to an end, of whatever kind."""
        return self._result is not None

    def cancel(self) -> None:
        """End the request now; its slot is free. Its result is what it has said so far. Later, nothing happens."""
        self._engine._cancel(self)

    def result(self) -> Result:
        """What `generate` returns for this prompt alone; the engine works until it is there.

        Raises the error of a request that failed: a ValueError or MemoryError of one sentence.
        """
        while self._result is None:
            self._engine.step()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
