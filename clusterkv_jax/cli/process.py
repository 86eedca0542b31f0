"""How the command's process ends, whatever happens: ready before typer, jax or anything else heavy is imported.

exit code 0 done · 2 an error, in one sentence · 75 to be started again (a process of the job is lost, or was asked to
end) · 130 interrupted · 141 who read the output has gone away
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

ERROR, RESTART, INTERRUPTED, CLOSED_PIPE = 2, 75, 130, 141


def run(command: Callable[[], None], *, debug: bool) -> NoReturn:
    """Ends the process with what comes of the command; with `debug` an error is Python's, traceback and all."""
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    code = _flushed(_code(command, debug))
    if code == INTERRUPTED:
        os._exit(code)  # jax crashes where Python takes apart what was being compiled
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and written; Python still takes its time to end
    sys.exit(code)


def _code(command: Callable[[], None], debug: bool) -> int:
    try:
        command()
    except KeyboardInterrupt:
        _tell("Interrupted.")
        return INTERRUPTED
    except SystemExit as end:
        # rich and typer end with 1 where a pipe is closed.
        return CLOSED_PIPE if isinstance(end.__context__, BrokenPipeError) else _number(end.code)
    except BrokenPipeError:
        return CLOSED_PIPE
    except Exception as error:
        if debug:
            raise
        _tell(f"Error: {error}")
        return ERROR
    return 0


def _number(code: str | int | None) -> int:
    """What `sys.exit` makes of its argument."""
    if code is None or isinstance(code, int):
        return code or 0
    _tell(code)
    return 1


def _tell(sentence: str) -> None:
    """Write to standard error, if it can be written to; the exit code says the rest."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def _flushed(code: int) -> int:
    """The exit code after what is still to be written has been; Python's own try at exit could only complain."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the descriptor is closed
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if isinstance(error, BrokenPipeError):
                code = code or CLOSED_PIPE
            elif not code:
                _tell(f"Error: {error.strerror}: standard output.")
                code = ERROR
    return code


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Ends the process at once while modules are imported, where an exception may be swallowed or shown as another;
    everywhere else KeyboardInterrupt lets files be closed.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    """An interrupt inside a callback that cannot raise is one all the same."""
    if what.exc_type is KeyboardInterrupt:
        _leave()
    sys.__unraisablehook__(what)


def _leave() -> NoReturn:
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
