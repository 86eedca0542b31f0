"""A conversion that is killed (SIGKILL) at moments all over its length goes on, and is never loadable half-written."""

import signal
import subprocess
import sys

import pytest

from clusterkv_jax.checkpoints.loading import load
from tests.support.checkpoint_files import LLAMA, random_tensors, same, write
from tests.support.processes import python

pytest.importorskip("orbax.checkpoint")

SMALL_PARTS = """
import os, random, signal, sys, threading, time
from clusterkv_jax.checkpoints import convert
from clusterkv_jax.checkpoints import orbax as orbax_files
convert.PART, orbax_files._LEAST_PIECE = 20_000, 256
convert._orbax()
"""
# Each conversion is a fork of a process that has imported everything, and prints whether it was killed.
KILLS = """
def converted(target, seconds=None):
    begin = time.perf_counter()
    if not (child := os.fork()):
        if seconds is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        convert.convert(source, target)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    print("killed" if status else "whole" if os.path.exists(target) else "neither")
    return time.perf_counter() - begin

source, unbroken, target = sys.argv[1:]
chance, kills, seconds = random.Random(0), 12, converted(unbroken)
for number in range(kills):
    # Some from the beginning, some on what others left: what was done takes no time again.
    converted(target, seconds * (number + chance.random()) / kills)
    if os.path.exists(target):
        break
converted(target)
"""
# Ends itself before parts are moved to where they are joined for the n-th time.
KILLED_WHILE_JOINING = """
from orbax.checkpoint._src.path import async_path
source, target, step = sys.argv[1:]
moves, rename, joining, finish = [], async_path.rename, [], convert._finish

async def counted(*paths):
    if joining and len(moves) == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    moves.extend([paths] if joining else [])
    return await rename(*paths)

async_path.rename = counted
convert._finish = lambda *arguments: joining.append(True) or finish(*arguments)
convert.convert(source, target)
os._exit(0)
"""


def test_a_killed_conversion_goes_on(tmp_path):
    published = {**LLAMA, "num_hidden_layers": 6}
    source = write(tmp_path / "source", published, random_tensors(published), shards=3)
    target = tmp_path / "target"
    first, *others, last = python("-c", SMALL_PARTS + KILLS, source, tmp_path / "unbroken", target).stdout.split()
    assert (first, last) == ("whole", "whole")
    assert "killed" in others
    assert same(load(target).params, load(source).params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", "unbroken"]


@pytest.mark.exhaustive
def test_killed_while_parts_are_joined(tmp_path):
    """The step that Orbax could not take twice, at each of its own steps."""
    source, ends = write(tmp_path / "source", LLAMA, random_tensors(LLAMA)), []
    for step in (0, 1, 5, 9, 14, 100):
        command = [sys.executable, "-c", SMALL_PARTS + KILLED_WHILE_JOINING, source, tmp_path / "target", str(step)]
        end = subprocess.run(command, check=False, capture_output=True, text=True)
        assert end.returncode in (0, -signal.SIGKILL), end.stderr
        ends.append(end.returncode)
        assert (tmp_path / "target").exists() == (end.returncode == 0)
    assert ends[0] == ends[2] == -signal.SIGKILL
    assert ends[-1] == 0
    assert same(load(tmp_path / "target").params, load(source).params)
