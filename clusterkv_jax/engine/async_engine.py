"""`AsyncEngine`: one thread owns an engine; any thread, and any asyncio loop, asks it through queues."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from clusterkv_jax.engine.engine import Engine
from clusterkv_jax.engine.metrics import EngineStats
from clusterkv_jax.engine.outputs import RequestOutput
from clusterkv_jax.engine.requests import Request


class AsyncEngine:
    """Serves requests of many threads. From when it is made until `close`, no other thread works with the engine.

    What is asked takes effect between two calls of the decode program.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Answers of requests that the owner has not seen yet, and requests to be cancelled, by their numbers.
        self._arriving: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self._lock, self._closed, self._stopping = threading.Lock(), False, False
        self._error: Exception | None = None
        engine.on_pause(self._cancel_asked)
        self._thread = threading.Thread(target=self._work, name="clusterkv-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread works; an error of the device ends it."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> "OutputStream":
        """Hand over a request that `Engine.request` has made, from any thread; nothing is waited for.

        Within a running asyncio loop the stream is for `async for` in that loop, elsewhere for `for`.

        Raises EngineFull if the queue is full, RuntimeError if the engine is closed or has failed.
        """
        stream = OutputStream(partial(self.cancel, request.request_id), request)
        with self._lock:
            self._check_open()
            self.engine.check_room(request, sum(self._arriving.values()))
            self._arriving[request.request_id] = request.params.n
            self._inbox.put(partial(self._add, request, stream))
        return stream

    def cancel(self, request_id: int) -> None:
        """End a request, all its answers; one that has ended, or was never handed over, is none."""
        self._cancelled.add(request_id)
        self._inbox.put(self._cancel_asked)

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """What `function(engine, *args)` returns in the thread that owns the engine, between two of its steps.

        Raises RuntimeError if the engine is closed or has failed.
        """
        result: Future[Any] = Future()

        def work() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function(self.engine, *args))
            except Exception as error:
                result.set_exception(error)

        with self._lock:
            self._check_open()
            self._inbox.put(work)
        return result

    def stats(self) -> EngineStats:
        """How the engine does, asked from any thread."""
        return self.engine.stats()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests, end the thread, and close the engine.

        With `drain` requests that were handed over come to their end; what runs after `timeout_s` is cancelled.
        """
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._inbox.put(self._stop if drain else self._abort)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._inbox.put(self._abort)
            self._thread.join()
        self.engine.close()

    # --- in the thread that owns the engine ---

    def _work(self) -> None:
        try:
            while not self._stopping or self.engine.busy or not self._inbox.empty():
                self._read_inbox()
                if self.engine.busy:
                    self.engine.step()
        except Exception as error:
            self._fail(error)

    def _read_inbox(self) -> None:
        """Do what was asked meanwhile; without anything else to do, wait for it."""
        while not self._inbox.empty() or not (self.engine.busy or self._stopping):
            self._inbox.get()()

    def _add(self, request: Request, stream: "OutputStream") -> None:
        with self._lock:
            self.engine.submit(request, stream.put)
            del self._arriving[request.request_id]

    def _cancel_asked(self) -> None:
        """End what was cancelled, while a prompt is read too; what has not arrived yet, when it has."""
        for request_id in self._cancelled - self._arriving.keys():
            self._cancelled.discard(request_id)
            self.engine.cancel(request_id)

    def _stop(self) -> None:
        self._stopping = True

    def _abort(self) -> None:
        self._stopping = True
        self.engine.cancel_all()

    def _fail(self, error: Exception) -> None:
        """Whoever waits hears of an error that leaves no slot as it was, and so does whoever comes later."""
        with self._lock:
            self._error = error
        self.engine.fail_all(error)
        while not self._inbox.empty():
            self._inbox.get()()
        self.engine.fail_all(error)

    def _check_open(self) -> None:
        if (error := self._error) is not None:
            raise RuntimeError(f"The engine has failed: {error}") from error
        if self._closed:
            raise RuntimeError("The engine is closed and takes no more requests.")


class OutputStream:
    """What is new of a request, as it comes: its `RequestOutput`s, or the error with which it has failed.

    Who stops listening cancels the request.
    """

    def __init__(self, cancel: Callable[[], None], request: Request) -> None:
        self.request, self._cancel, self._left = request, cancel, request.params.n
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._queue: Any = SimpleQueue()
            self._pass_on: Callable[..., Any] = self._queue.put
        else:
            self._queue = asyncio.Queue()
            self._pass_on = partial(loop.call_soon_threadsafe, self._queue.put_nowait)

    def cancel(self) -> None:
        """End the request; one whose answers have all been taken does not wake the engine's thread for that."""
        if self._left:
            self._cancel()

    def put(self, output: RequestOutput | Exception) -> None:
        """Pass on an output, from the thread that owns the engine."""
        try:
            self._pass_on(output)
        except RuntimeError:  # the loop is closed: nobody listens
            self.cancel()

    def __iter__(self) -> Iterator[RequestOutput]:
        try:
            while self._left:
                yield self._taken(self._queue.get())
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            while self._left:
                yield self._taken(await self._queue.get())
        finally:
            self.cancel()

    def _taken(self, output: RequestOutput | Exception) -> RequestOutput:
        if isinstance(output, Exception):
            self._left = 0
            raise output
        self._left -= output.finish_reason is not None
        return output
