"""A process that serves and saves is killed; another one answers from the contexts that it saved."""

import itertools
import signal
import subprocess
import sys
import time

from tests.engine.test_engine import EIGHT, alone, engine
from tests.support.tiny import prompt

CONTEXTS = range(3)


def serve(folder: str) -> None:
    """Answer and save without end; a line says that each context has been saved once."""
    served = engine()
    contexts = [served.read(prompt(seed, 50)) for seed in CONTEXTS]
    for turn in itertools.count():
        for seed, context in zip(CONTEXTS, contexts, strict=True):
            served.add(context, prompt(904, 4), max_new_tokens=20)
            served.add(prompt(turn, 30), max_new_tokens=20)
            served.step()
            served.save(context, f"{folder}/{seed}.safetensors")
        if turn == 0:
            print("saved", flush=True)


def test_contexts_outlive_a_killed_process(tmp_path):
    code = f"from tests.engine.test_restart import serve; serve({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "saved\n"
            time.sleep(0.5)  # into some later answer or file
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL
    served = engine()
    handles = [served.add(tmp_path / f"{seed}.safetensors", prompt(904, 4), **EIGHT) for seed in CONTEXTS]
    assert [tuple(handle.result().tokens[0]) for handle in handles] == [alone(seed, 50, 4) for seed in CONTEXTS]
