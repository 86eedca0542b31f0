"""Processes that do one job together: what they tell each other, and how all of them end when one does.

Texts go through the key-value store of jax.distributed, which process 0 holds. A thread of each process leaves a beat
there and looks for the others'; another one judges what was seen and ends the process, whatever the main thread waits
for. So it does where the system asks for the end (SIGTERM), as soon as no line is being written. Who ends for a reason
that the others must know leaves it there.

    beats/K    a number that grows while process K lives
    ends/K     why process K ends, and with which exit code all others shall
"""

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
from jax._src import compiler, distributed

from clusterkv_jax.cli.process import ERROR, RESTART

# How long processes of one job may start apart; and much longer than any process is waited for.
START_SECONDS, NEVER = 300, 10**6
# Beats of a process within the time after which it is lost.
BEATS = 5
# The longest that a line in flight may take when the process is asked to end.
WRITE_SECONDS = 8
_log = logging.getLogger(__name__)


class ProcessGroup:
    """This process and those it works with.

    Attributes:
        index: of this process, 0 for the one that writes.
        hosts: names of all processes' hosts.
        writing: a lock, held while results are written: the process does not end meanwhile.
    """

    def __init__(self, client: Any, index: int, count: int, address: str, timeout: float) -> None:
        self.index, self.writing = index, threading.Lock()
        self._client, self._address, self._timeout = client, address, timeout
        self._interval = min(5.0, timeout / BEATS)
        now = time.monotonic()
        self._beats: dict[int, str] = {}
        self._seen, self._contact, self._ends = dict.fromkeys(range(count), now), now, {}
        self._over, self._all_done = threading.Event(), False
        self._signals = _signals()
        self._abort = _on_abort(self._aborted)
        self.hosts = dict.fromkeys(range(count), "unknown host")
        self.tell(f"hosts/{index}", socket.gethostname())
        for task in (self._beat, self._watch):
            threading.Thread(target=task, daemon=True).start()
        self.hosts = {number: self.hear(f"hosts/{number}") for number in range(count)}

    # --- texts ---

    def tell(self, name: str, text: str) -> None:
        """Leave a text under a name, for all processes."""
        self._client.key_value_set(f"clusterkv/{name}", text, allow_overwrite=True)

    def hear(self, name: str) -> str:
        """The text under a name, as soon as it is there."""
        return self._client.blocking_key_value_get(f"clusterkv/{name}", NEVER * 1000)

    def take(self, folder: str) -> list[tuple[str, str]]:
        """All texts under folder/, with the rests of their names; they are gone then."""
        texts = self._client.key_value_dir_get(f"clusterkv/{folder}/")
        for name, _ in texts:
            self._client.key_value_delete(name)
        return [(name.rsplit("/", 1)[1], text) for name, text in texts]

    # --- ends ---

    def finish(self) -> NoReturn:
        """Ends this process when all is done everywhere."""
        if self.index == 0:
            self.tell("done", "")
            for number in list(self.hosts)[1:]:
                self.hear(f"bye/{number}")
            self._over.set()
            _log.info("done")
        else:
            self.hear("done")
            _log.info("done")  # before the goodbye: without process 0, `_aborted` may end this process at once
            self._all_done = True
            self._over.set()
            with contextlib.suppress(Exception):  # process 0 may be gone before it has answered
                self.tell(f"bye/{self.index}", "")
        _leave(0)

    def fail(self, sentence: str, code: int = ERROR) -> NoReturn:
        """Ends all processes: this one with a sentence, the others with one that names it."""
        if code == RESTART:
            sentence = f"{self._name(self.index)} {sentence}"
            self._end(code, sentence, tell=sentence)
        self._end(code, sentence, tell=f"{self._name(self.index)} ended: {sentence}")

    def wait_for_a_loss(self) -> None:
        """Let the watch speak first where a broken connection may be a lost peer's doing."""
        time.sleep(self._timeout + 2 * self._interval)

    def _name(self, number: int) -> str:
        return f"Process {number} ({self.hosts[number]})"

    def _end(self, code: int, sentence: str, tell: str | None = None) -> NoReturn:
        """Ends this process as soon as no line is being written; `tell` goes to the others."""
        if self._over.is_set():
            time.sleep(NEVER)  # another thread is ending it
        self._over.set()
        if tell is not None:
            post = threading.Thread(target=self._leave_word, args=(code, tell), daemon=True)
            post.start()
            post.join(self._interval)
        held = self.writing.acquire(timeout=WRITE_SECONDS)
        _log.info("%s%s", sentence, "" if held else " A line was still being written.")
        print(f"Error: {sentence}", file=sys.stderr)
        if self.index == 0:  # the others read its words as long as it is here, and must not start an error again
            time.sleep(1.2 * self._interval if code == ERROR else min(2 * self._interval, 1.5))
        _leave(code)

    def _leave_word(self, code: int, text: str) -> None:
        try:
            self.tell(f"ends/{self.index}", json.dumps([code, text]))
        except Exception as error:
            _log.info("The others could not be told: %s", error)

    def _aborted(self) -> None:
        """A library gives up this process: jax does so when the connection to process 0 breaks."""
        if self._all_done:  # process 0 has left first, and this may be the thread that says goodbye
            os._exit(0)
        host, port = self._address.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as line:
            if line.recv(1):  # a living process 0 speaks first
                return
        self._end(RESTART, f"{self._name(0)} is gone: nobody answers at {self._address} any more.")

    # --- what is seen of the others ---

    def _beat(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self.tell(f"beats/{self.index}", str(number))
                beats = self._client.key_value_dir_get("clusterkv/beats/")
                ends = self._client.key_value_dir_get("clusterkv/ends/")
            except Exception as error:
                _log.info("No beat: %s", error)
            else:
                self._contact = now = time.monotonic()
                for name, text in beats:
                    peer = int(name.rsplit("/", 1)[1])
                    if self._beats.get(peer) != text:
                        self._beats[peer], self._seen[peer] = text, now
                self._ends = {int(name.rsplit("/", 1)[1]): text for name, text in ends}
            time.sleep(self._interval)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.is_set():
            if signal.SIGTERM in self._asked():
                self.fail("was asked to end (SIGTERM).", RESTART)
            now = time.monotonic()
            if now - looked > self._timeout:
                self.fail(f"stood still for {now - looked:.0f} s, and the others have given it up.", RESTART)
            looked = now
            for number, text in self._ends.items():
                if number != self.index:
                    self._end(*json.loads(text))
            if (lost := self._lost(now)) is not None:
                sentence = f"{self._name(lost)} has not been heard of for {self._timeout:g} s."
                self._end(RESTART, sentence, tell=sentence)

    def _asked(self) -> bytes:
        """The numbers of signals that came within an interval."""
        ready, _, _ = select.select([self._signals], [], [], min(0.5, self._interval))
        return self._signals.recv(64) if ready else b""

    def _lost(self, now: float) -> int | None:
        """The first process that has not been heard of for too long; the others are heard of through process 0."""
        contact = self._contact
        if self.index and now - contact > self._timeout:
            return 0
        return next((i for i, seen in self._seen.items() if contact - seen > self._timeout), None)


def join(address: str | None, count: int | None, index: int | None, timeout: float) -> ProcessGroup:
    """Meet the other processes of the job. On TPU pods and under SLURM, jax finds them without arguments.

    Raises ValueError for some of the arguments without the others, or none where nothing says who the others are.
    """
    given = [value is not None for value in (address, count, index)]
    if any(given) != all(given):
        raise ValueError("--coordinator-address, --num-processes and --process-id are given together, or none of them.")
    if count is not None and index is not None and index >= count:
        raise ValueError(f"--process-id is at most {count - 1} with --num-processes {count}, got {index}.")
    # SIGTERM is for `ProcessGroup`.
    jax.config.update("jax_enable_preemption_service", False)
    # Without a callback jax ends the process itself, with code 1, when process 0 is gone. With one, jaxlib 0.10 aborts,
    # which `_on_abort` catches.
    library: Any = vars(distributed)["_jax"]
    name = "get_distributed_runtime_client"
    original = getattr(library, name)
    setattr(library, name, partial(original, missed_heartbeat_callback=lambda *_: None))
    try:
        jax.distributed.initialize(
            address, count, index, initialization_timeout=START_SECONDS, heartbeat_timeout_seconds=NEVER
        )
    except ValueError as error:
        raise ValueError(
            "Nothing here says which processes work together; give --coordinator-address HOST:PORT, --num-processes "
            "and --process-id."
        ) from error
    except RuntimeError as error:
        print(f"Error: Not all processes of the job came within {START_SECONDS} s: {error}", file=sys.stderr)
        _leave(RESTART)
    finally:
        setattr(library, name, original)
    state = distributed.global_state
    _let_all_write_programs(state)
    return ProcessGroup(state.client, state.process_id, state.num_processes, str(state.coordinator_address), timeout)


def _let_all_write_programs(state: Any) -> None:
    """In jax process 0 alone writes compiled programs to their cache, and it has none of other processes' devices."""
    original = getattr(compiler, "_cache_write", None)
    if original is None:
        return

    def write(*args: Any, **options: Any) -> None:
        index, state.process_id = state.process_id, 0
        try:
            original(*args, **options)
        finally:
            state.process_id = index

    compiler._cache_write = write


def _signals() -> socket.socket:
    """A socket that gets the number of each signal at once, whatever the main thread does."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return ours


def _on_abort(action: Callable[[], None]) -> Any:
    """Calls `action` where the process is about to abort; what comes back must be kept as long as it may be called."""
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: action())
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
    return handler


def _leave(code: int) -> NoReturn:
    """Ends the process without jax's own goodbye, which would wait for processes that are gone."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    logging.shutdown()
    os._exit(code)
