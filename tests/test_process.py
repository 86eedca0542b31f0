"""How the command's process ends: its exit codes, and that nobody sees a traceback who did not ask for one."""

import os
import re
import subprocess
import sys

import pytest

# Something that sends the interrupt of Ctrl-C when a module is first looked for.
INTERRUPTS_IMPORT = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from clusterkv_jax.cli import main
main(["methods"])
"""
# A compiler for GPUs says at its import that there is none.
LOGGED = re.compile(r"WARNING: All log messages before absl|I\d{4} .*cudart_stub")
RUN = """
import os, signal, sys
from clusterkv_jax.cli.process import run

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Falling:
    def __del__(self):
        interrupt()

def command():
    {command}

run(command, debug={debug})
"""


def ended(code, stdout=subprocess.PIPE):
    """The exit code of a program and what it writes to standard error, but for logs of compilers for accelerators."""
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    lines = process.stderr.splitlines(keepends=True)
    return process.returncode, "".join(line for line in lines if not LOGGED.match(line))


@pytest.mark.parametrize("module", ["clusterkv_jax.cli.commands", "typer", "rich.table", "jax", "jax._src.core"])
def test_an_interrupt_while_modules_are_imported_ends_at_once(module):
    assert ended(INTERRUPTS_IMPORT.format(module=module)) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("interrupt()", 130, "Interrupted.\n"),
        ("Falling()", 130, "Interrupted.\n"),  # where Python ignores exceptions
        ("raise TypeError('a fault')", 2, "Error: a fault\n"),
    ],
)
def test_a_command_ends_with_its_code_and_a_sentence(command, code, said):
    assert ended(RUN.format(command=command, debug=False)) == (code, said)


def test_files_are_closed_before_an_interrupt_ends_the_command():
    command = "\n    ".join(["try:", "    interrupt()", "finally:", "    print('closed', file=sys.stderr)"])
    assert ended(RUN.format(command=command, debug=False)) == (130, "closed\nInterrupted.\n")


def test_a_traceback_is_shown_to_those_who_ask():
    code, said = ended(RUN.format(command="raise TypeError('a fault')", debug=True))
    assert code == 1
    assert said.startswith("Traceback")


PRINTS = ("print('an answer')", "sys.stdout.write('x' * 100_000)")  # the first is written when the command has ended


@pytest.mark.parametrize(
    "code",
    [
        *(RUN.format(command=command, debug=False) for command in PRINTS),
        "from clusterkv_jax.cli import main; main(['--help'])",
        "from clusterkv_jax.cli import main; main(['evaluate', '--help'])",
    ],
)
def test_a_closed_pipe_is_not_an_error(code):
    reading, writing = os.pipe()
    os.close(reading)
    assert ended(code, stdout=writing) == (141, "")
    os.close(writing)


@pytest.mark.parametrize("command", PRINTS)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_onto_a_full_disk_gets_one_sentence(command):
    with open("/dev/full", "w") as full:
        code, said = ended(RUN.format(command=command, debug=False), stdout=full)
    assert code == 2
    assert said.startswith("Error: ")
    assert "No space left on device" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("broken", ["closed", "full"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_that_nobody_can_read_keeps_its_code(broken):
    place = "os.pipe()[1]" if broken == "closed" else "os.open('/dev/full', os.O_WRONLY)"
    ends = f"import os; os.dup2({place}, 2)"
    ends += "; os.closerange(3, 99)" if broken == "closed" else ""
    code = RUN.format(command="raise ValueError('A sentence.')", debug=False)
    assert ended(f"{ends}\n{code}")[0] == 2


def test_a_closed_standard_output_is_none():
    command = [sys.executable, "-m", "clusterkv_jax.cli", "--help"]
    assert ended(f"import os; os.close(1); os.execv({command[0]!r}, {command})") == (0, "")
