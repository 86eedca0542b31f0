"""Compiled for TPUs that are not there: every kernel, and the decode program, which holds one cache, not two."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

# Llama-3.1-8B at its full context. Two layers show it: every layer adds its own scratch, and its own cache.
LAYERS, BATCH, TOKENS = "2", "16", "131072"


pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra `test`)"),
]


def run(script: str, *args: str) -> dict:
    """What a script beside this file prints last, as JSON."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_for_every_tpu():
    found = run("tpu_kernel_programs.py")
    assert len(found) == 3 * 6
    for name, program in found.items():
        # The kernel, not its XLA stand-in, with an estimate of its cost: it reads its operands at least.
        assert program["kernels"] == 1, name
        assert program["flops"] > 0, name
        assert program["bytes"] >= program["operands"], name


def test_the_decode_loop_works_in_the_donated_cache():
    found = run("tpu_decode_program.py", LAYERS, BATCH, TOKENS)
    # Aliased: the whole cache (and the small loop state beside it).
    assert found["cache"] <= found["alias"] <= 1.01 * found["cache"]
    # Some 2.6 MB a layer whatever the cache holds: almost all of it are tables of operations with several results, of
    # which each takes 16 KiB. Nothing grows with the cache.
    assert found["temporary"] <= 0.02 * found["cache"]
    assert found["conditionals"] == 1
