"""A conversion that is killed (SIGKILL) at moments all over its length goes on, and is never loadable half-written."""

import random
import signal
import subprocess
import sys

import pytest

from clusterkv_jax.checkpoints.loading import load
from tests.support.checkpoint_files import LLAMA, random_tensors, same, write
from tests.support.processes import python

pytest.importorskip("orbax.checkpoint")

# Ends itself so many seconds after all is imported; a negative number never.
CONVERT = """
import os, signal, sys, threading, time
from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints import orbax as orbax_files
convert.PART, orbax_files._LEAST_PIECE = 20_000, 256
convert._orbax()
source, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
begin = time.perf_counter()
if seconds >= 0:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
convert.convert(source, target)
print(time.perf_counter() - begin, flush=True)
os._exit(0)
"""
KILLS = 12


def test_a_killed_conversion_goes_on(tmp_path):
    published = {**LLAMA, "num_hidden_layers": 6}
    source = write(tmp_path / "source", published, random_tensors(published), shards=3)
    whole = load(source)
    seconds = float(python("-c", CONVERT, source, tmp_path / "unbroken", -1).stdout)
    chance, killed = random.Random(0), 0
    target = tmp_path / "target"
    for number in range(KILLS):
        # Some from the beginning, some on what others left: what was done takes no time again.
        moment = seconds * (number + chance.random()) / KILLS
        command = [sys.executable, "-c", CONVERT, source, target, str(moment)]
        killed += subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
        if target.exists():
            assert same(load(target).params, whole.params)
            break
    assert killed > 0
    python("-c", CONVERT, source, target, -1)
    assert same(load(target).params, whole.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", "unbroken"]


@pytest.mark.exhaustive
def test_killed_while_parts_are_joined(tmp_path):
    """The step that Orbax could not take twice, at each of its own steps."""
    source = write(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    program = CONVERT.replace(
        "begin = ",
        "from pathlib import Path; from orbax.checkpoint._src.path import async_path\n"
        "moves, rename = [], async_path.rename\n"
        "async def counted(*paths):\n"
        "    if convert._joining and len(moves) == int(sys.argv[4]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    moves.append(paths) if convert._joining else None\n"
        "    return await rename(*paths)\n"
        "async_path.rename = counted\n"
        "conversion._joining, finish = False, convert._finish\n"
        "def joining(*arguments):\n"
        "    convert._joining = True\n"
        "    finish(*arguments)\n"
        "conversion._finish = joining\n"
        "begin = ",
    )
    ends = []
    for step in (0, 1, 5, 9, 14, 100):
        command = [sys.executable, "-c", program, source, tmp_path / "target", "-1", str(step)]
        end = subprocess.run(command, check=False, capture_output=True, text=True)
        assert end.returncode in (0, -signal.SIGKILL), end.stderr
        ends.append(end.returncode)
        assert (tmp_path / "target").exists() == (end.returncode == 0)
    assert ends[0] == ends[2] == -signal.SIGKILL
    assert ends[-1] == 0
    assert same(load(tmp_path / "target").params, load(source).params)
