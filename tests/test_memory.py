"""What is said when memory does not suffice, and what is left behind then."""

import jax
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.decoding import prefilling
from clusterkv_jax.runtime.errors import out_of_memory_explained
from tests.support.tiny import prompt, tiny

HOST = ckv.ClusterKV(ckv.Budget(ratio=0.5), sinks=2, tokens_per_cluster=4, dense_layers=1, store="host")


def said(text, *, uses_host=False):
    with pytest.raises(MemoryError) as caught, out_of_memory_explained("reading 2 x 64 tokens", uses_host=uses_host):
        raise jax.errors.JaxRuntimeError(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("Out of memory while trying to allocate 7516192768 bytes.", " (7 GiB were asked for)"),
        ("Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0", " (0.172 GiB were asked for)"),
        ("Ran out of memory in memory space hbm. Used 20.05G of 15.75G hbm.", " (20.1 GiB were asked for)"),
        ("Out of memory.\nAllocation 1 of many", ""),
    ],
)
def test_the_sentence_says_what_was_made_how_much_it_took_and_what_helps(text, amount):
    assert said(f"RESOURCE_EXHAUSTED: {text}") == (
        f"Out of device memory while reading 2 x 64 tokens{amount}; take a smaller batch, a shorter prompt, "
        'a smaller budget, a smaller prefill_chunk or ClusterKV with store="host".'
    )


def test_the_hosts_memory_is_told_from_the_devices():
    device = said("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes on device 0.", uses_host=True)
    assert device.startswith("Out of device memory")
    assert "store" not in device
    host = said("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes in host memory.", uses_host=True)
    assert host.startswith("Out of host memory while reading 2 x 64 tokens (1 GiB were asked for); take")
    assert 'store="device"' in host
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in host
    assert host.count(".") == 1


@pytest.mark.parametrize("text", ["INTERNAL: a fault", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem."])
def test_other_errors_stay_as_they_are(text):
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory_explained("reading", uses_host=False):
        raise jax.errors.JaxRuntimeError(text)


def test_a_layer_that_does_not_fit_leaves_a_model_that_still_answers(monkeypatch):
    """Layer after layer is read into new arrays; parameters are never given away."""
    layer, calls = prefilling._read_layer, []

    def second_fails(*operands):
        calls.append(operands)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.")
        return layer(*operands)

    monkeypatch.setattr(prefilling, "_read_layer", second_fails)
    with pytest.raises(MemoryError, match="reading 1 x 64 tokens"):
        ckv.generate(tiny(), [prompt(1, 48)], method=HOST, max_new_tokens=4)
    assert ckv.generate(tiny(), [prompt(1, 48)], method=HOST, max_new_tokens=4).stats.new_tokens == [4]
