"""Profiles read like the code: every stage of a layer, of compression and of decoding names its operations."""

import re

import jax
import jax.numpy as jnp
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.sampling import Sampling
from tests.support.tiny import prompt, tiny

METHOD = ckv.CentroidKV(ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16, interval=8)


@pytest.fixture(scope="module")
def programs():
    """What prefill lowers to, and the decode program."""
    model, lowered = tiny(), []

    def run(program, *args):
        lowered.append(program.lower(*args))
        return program(*args)

    arguments = model.params, model.config, METHOD
    tokens, lengths = jnp.asarray([prompt(1, 48)]), jnp.asarray([48])
    cache, logits = ckv.prefill(*arguments, tokens, lengths, max_new_tokens=24, call=run)
    state, number = DecodeState(cache, jnp.argmax(logits, -1).astype(jnp.int32), jnp.zeros(1, bool)), jnp.int32(1)
    options = {"sampling": Sampling(), "eos_ids": (), "steps": 4}
    decoding = decode_loop.lower(*arguments, state, jax.random.key(0), number, number, **options)
    return lowered, decoding.compile()


def paths(lowered):
    return set(re.findall(r'loc\("([^"]*)"', lowered.as_text(debug_info=True)))


def names(compiled):
    """The names of a compiled program's operations, as a profile shows them but for jitted functions on the way."""
    return {re.sub(r"jit\([^)]*\)/", "", name) for name in re.findall(r'op_name="([^"]*)"', compiled.as_text())}


@pytest.mark.parametrize(
    "stage",
    [
        "embedding",
        *(f"layer_{n}/{part}" for n in (0, 1) for part in ("attention/project", "attention/step/attend", "mlp")),
        "layer_1/attention/output",
        "head",
        "sampling",
        "recompress",
    ],
)
def test_decoding_names_its_stages(programs, stage):
    assert any(f"/{stage}/" in name for name in names(programs[1]))


def test_prefill_names_its_stages(programs):
    found = set().union(*map(paths, programs[0]))
    for stage in ("embedding", "attention/project", "attention/attend", "attention/output", "mlp", "compress", "head"):
        assert any(f"/{stage}" in path for path in found), stage
