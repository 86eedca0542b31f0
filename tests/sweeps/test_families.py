"""Every method on every family: no sequence of a batch notices another, budgets are exact."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.generation.batch import make_batch
from clusterkv_jax.generation.stages import prefill_batch
from clusterkv_jax.methods.request import request_of_model
from clusterkv_jax.models import registry
from clusterkv_jax.models.decoder import forward
from tests.support.families import PUBLISHED
from tests.support.methods import every_method, named
from tests.support.tiny import VOCAB, calmed, prompt, random_params, untied, with_surrogate

HALF = ckv.Budget(ratio=0.5)
WORDS = ((3, 5), (7, 1, 4), (2,))
METHODS = [
    *every_method(HALF),
    ckv.Chelsea(HALF, sinks=2, recent=4, chunk=16, interval=4),
    ckv.KVzip(HALF, plus=True, chunk=16, instruction=WORDS),
    ckv.Quest(HALF, page=4, min_pages=2, dense_layers=0),
    ckv.ClusterKV(HALF, sinks=2, tokens_per_cluster=4, interval=4, interval_clusters=2, dense_layers=0),
    ckv.InfiniGen(HALF, partial_ratio=0.5, dense_layers=0),
]
NAMES = list(PUBLISHED)
# `make parity` has tokens and logits of every family; of these the caches differ: equal layers, windows beside them,
# sink logits, layers without rotations, positions that are learned.
UNLIKE = ("llama", "gemma3_text", "gpt_oss", "smollm3", "opt")
EACH = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in UNLIKE)) for name in NAMES]
# Every other method meets one family in the ordinary run, and neighbours in this list different ones.
CASES = [
    pytest.param(
        name,
        method,
        id=f"{name}-{named(method)}",
        marks=[] if i % 2 == 0 and (i - j) % len(NAMES) == 0 else pytest.mark.exhaustive,
    )
    for i, method in enumerate(METHODS)
    for j, name in enumerate(NAMES)
]
# Of two prompts, and of one that stands beside either.
LENGTHS = [48, 33, 40]


@functools.cache
def model_of(name: str) -> ckv.Model:
    """A family's decoder with random weights."""
    config = replace(registry.from_hf(PUBLISHED[name]), vocab_size=VOCAB, eos_ids=(), bos_id=None, pad_id=None)
    params = random_params(config)
    return untied(with_surrogate(ckv.Model(params=params, config=config, tokenizer=None, mesh=None, name=name)))


def answers(name: str, method: Any, seeds: list[int]) -> ckv.Result:
    """Ten greedy tokens after prompts and their questions."""
    prompts, questions = [prompt(seed, LENGTHS[seed]) for seed in seeds], [prompt(9, 5)] * len(seeds)
    return ckv.generate(calmed(model_of(name), method), prompts, method=method, questions=questions, max_new_tokens=10)


@pytest.mark.parametrize("name", EACH)
def test_all_rows_are_the_model_without_a_cache(name):
    model, texts = model_of(name), [prompt(seed, length) for seed, length in enumerate(LENGTHS[:2])]
    result = ckv.generate(model, texts, method=ckv.Full(), max_new_tokens=10)
    read = jax.jit(forward, static_argnums=1)
    for text, tokens in zip(texts, result.tokens, strict=True):
        ids = [*text, *tokens]
        padded = jnp.asarray([ids + [0] * (64 - len(ids))], jnp.int32)
        logits = read(model.params, model.config, padded)[0, len(text) - 1 : len(ids) - 1]
        np.testing.assert_array_equal(jnp.argmax(logits, axis=-1), tokens)


@pytest.mark.parametrize("name", EACH)
def test_all_rows_are_those_read_bit_for_bit(name):
    model, texts, read = model_of(name), [prompt(seed, length) for seed, length in enumerate(LENGTHS[:2])], []

    def run(program, *args):
        result = program(*args)
        if program.__name__ == "_read_layer":
            read.append(result[1])
        return result

    batch = make_batch(model, texts, questions=None, max_new_tokens=10, stop=(), prefill_chunk=None, streams=False)
    cache, _ = prefill_batch(model, ckv.Full(), batch, jax.random.key(0), call=run)
    assert len(read) == len(cache.layers)
    assert model.config.global_layers
    for number in model.config.global_layers:
        held, rows = cache.layers[number], read[number]
        for place, text in enumerate(texts):
            for kept, all_rows in ((held.keys, rows.keys), (held.values, rows.values)):
                np.testing.assert_array_equal(kept[place, :, : len(text)], all_rows[place, :, : len(text)])
        np.testing.assert_array_equal(held.length, np.broadcast_to([[len(x)] for x in texts], held.length.shape))


@pytest.mark.parametrize(("name", "method"), CASES)
def test_sequences_of_a_batch_are_their_own_within_the_budget(name, method):
    """What stands beside a prompt, and which of them comes first, does not matter; all are batches of two, which share
    their programs.
    """
    both, budgets = answers(name, method, [0, 1]), budget_rows(name, method)
    for seed, others in ((0, [2, 0]), (1, [1, 2])):
        moved, place = answers(name, method, others), others.index(seed)
        assert both.tokens[seed] == moved.tokens[place]
        held = [layer[place] for layer in moved.stats.kept_rows]
        assert [layer[seed] for layer in both.stats.kept_rows] == held
        if method.forgets:
            np.testing.assert_array_equal(np.sum(held, axis=1), budgets[:, seed])
        else:
            assert {rows for layer in held for rows in layer} == {LENGTHS[seed]}


def budget_rows(name: str, method: Any) -> np.ndarray:
    """The rows that the heads of each layer may hold together, of each prompt [L,B]."""
    model, lengths = model_of(name), np.asarray(LENGTHS[:2])
    counts = {"max_new_tokens": 10, "reserve": 15, "step_tokens": 5}
    request = request_of_model(model.config, model.params["embed"].dtype, lengths, None, **counts)
    rows = [method.budget_rows(lengths, layer, request) for layer in range(request.num_layers)]
    return np.stack([each if each.ndim == 2 else each[..., 0] for each in rows]).sum(axis=-1)
