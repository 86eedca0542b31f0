"""Compiled for TPUs that are not there: every kernel, and the decode program, which holds one cache, not two."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import compiled, python

# Llama-3.1-8B at its full context. Two layers show it: every layer adds its own scratch, and its own cache.
LAYERS, BATCH, TOKENS = "2", "16", "131072"


pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra `compile`)"),
]


def often(*case: Any) -> Any:
    """A case for runs that try everything."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def run(script: str, *args: str) -> dict:
    """What a script beside this file prints last, as JSON."""
    return compiled(Path(__file__).with_name(script), *args)


@pytest.mark.parametrize(("which", "count"), [("ordinary", 13), often("others", 2 * 13)])
def test_every_kernel_compiles_for_tpus(which, count):
    programs = run("tpu_kernel_programs.py", which)
    assert len(programs) == count
    for name, program in programs.items():
        # The kernel, not its XLA stand-in, with an estimate of its cost: it reads its operands at least.
        assert program["kernels"] == (2 if name.startswith("sums") else 1), name
        assert program["flops"] > 0, name
        assert program["bytes"] >= program["operands"], name
        if name.startswith("decode step of"):  # beside a bias, no copy of the codes, in another layout say
            assert program["temporary"] < program["operands"] / 10, name


def test_the_decode_loop_works_in_the_donated_cache():
    program = run("tpu_decode_program.py", "centroidkv", LAYERS, BATCH, TOKENS)
    # Aliased: the whole cache (and the small loop state beside it).
    assert program["cache"] <= program["alias"] <= 1.01 * program["cache"]
    # Some 2.6 MB a layer whatever the cache holds: almost all of it are tables of operations with several results, of
    # which each takes 16 KiB. Nothing grows with the cache.
    assert program["temporary"] <= 0.02 * program["cache"]
    assert program["conditionals"] == 1


@pytest.mark.parametrize("topology", ["v5e:2x4", often("v5p:2x2x2"), "v6e:4x4"])
def test_learned_scores_move_no_cache(topology):
    """OrbitKV, compressing while it decodes: only the 16 chips of the last share slots, and gather one layer's keys."""
    program = run("tpu_decode_program.py", "auto", LAYERS, "1", "32768", topology)
    assert program["alias"] >= program["cache"]
    assert program["conditionals"] == 1
    if topology == "v6e:4x4":
        assert program["largest collective"] <= program["cache"]
    else:
        assert program["largest collective"] <= 0.02 * program["cache"]


def test_decoding_with_pages_allocates_nothing():
    """The pages are written where they lie; what grows with them are outputs of attention, one for each page."""
    program = run("tpu_decode_program.py", "adakv", LAYERS, BATCH, TOKENS)
    assert program["alias"] >= program["cache"]
    assert program["temporary"] <= 0.06 * program["cache"]
    assert program["conditionals"] == 0


def test_attention_that_is_counted_is_a_kernel_on_every_device_too():
    """A kernel outside of shard_map does not compile over a mesh; H2O asks it for probabilities."""
    program = run("tpu_decode_program.py", "h2o", "1", "1", "8192")
    assert program["kernels"] == 1
    assert program["conditionals"] == 0
    assert program["alias"] >= program["cache"]


def test_reading_a_prompt_makes_no_square_of_it():
    """Beside parameters and caches: the activations of one layer, its own full keys and values, and no n x n scores.

    H2O is the method that sums over all of them, AdaKV the one that spreads its rows over pages; docs/results/parts.md
    has the others. A quarter of the model shows it, and compiles in half of the time.
    """
    programs = run("tpu_prefill_programs.py", "32768", "4", "h2o", "adakv")
    for name, program in programs.items():
        assert program["temporary"] <= program["activations"] + program["full_cache"], name
        assert program["temporary"] < 32768**2 * 4, name  # not even the scores of a single head
        # The hidden states are handed on in place; what comes out beside them is the compressed cache.
        assert program["alias"] == 32768 * 1024 * 2, name
        # The budget, the tokens that may be appended, and tiles, or pages that are not full: an interval at most.
        assert abs(program["slots"] - int(0.2 * 32768)) <= 128 + (128 if name == "adakv" else 16), name


@pytest.mark.parametrize(("topology", "most"), [("v5e:2x4", 0.5), often("v5p:2x2x2", 2.5), often("v6e:2x4", 0.5)])
def test_a_gated_prompt_grows_its_cache_in_place(topology, most):
    """A chunk has one program for all equal layers, and brings no second cache: on a v5p its hidden states are larger
    than a chip's part of a layer. A layer returns to new memory, by a program while the prompt is read and one in the
    end.
    """
    programs = run("tpu_gated_programs.py", "kvzap", TOKENS, topology)[topology]
    chunk, budget = programs["chunk"], programs["budget"]
    assert (chunk["programs"], budget["programs"]) == (1, 2)
    assert chunk["alias"] >= 0.99 * chunk["reading"]
    assert chunk["temporary"] < most * chunk["reading"]
    assert budget["temporary"] < 0.1 * chunk["reading"]


_SPLASH = """
from functools import partial
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from clusterkv_jax.blocks import causal_attention as attention
from clusterkv_jax.planning.devices import tpu_devices
mesh = Mesh(np.array(tpu_devices("v5e:2x2")).reshape(2, 2), ("data", "model"))
sharding = NamedSharding(mesh, P("data", None, "model", None))
x = lambda heads: jax.ShapeDtypeStruct((2, 1536, heads, 128), jnp.bfloat16, sharding=sharding)
with jax.set_mesh(mesh):
    for window, soft_cap in ((None, None), (400, 50.0)):
        splash = partial(attention._splash, window=window, soft_cap=soft_cap)
        run = lambda q, k, v: attention._over_mesh(splash, q, k, v)
        loss = lambda *operands: run(*operands).astype(jnp.float32).sum()
        for function in (run, jax.grad(loss, (0, 1, 2))):
            text = jax.jit(function).lower(x(8), x(2), x(2)).compile().as_text()
            assert "tpu_custom_call" in text, text
"""


def test_splash_compiles_for_a_tpu():
    """Without windows and caps, and with both."""
    python("-c", _SPLASH, cwd=Path(__file__).parent)


@pytest.mark.parametrize("weights", ["int4", often("int8")])
def test_no_weights_of_a_step_become_numbers_in_memory(weights):
    """A layer and the head, in whose codes embeddings are looked up, of which there is no copy. On a chip gate has 3.7
    MB in int4, and 14.7 in bfloat16, the head 67; beside it there are tables.
    """
    program = run("tpu_decode_program.py", "centroidkv", "1", "4", "32768", "v5e:2x4", weights)
    assert program["temporary"] < 4096 * 14336 / 8
