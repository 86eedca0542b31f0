"""Settings of every test: eight fake CPU devices, quick compilation, strict dtypes, bounded property tests."""

import gc
import os
from pathlib import Path

# Before jax is imported: its platform and the number of its host devices are fixed by then.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# Workers of pytest-xdist fork from a process that has used tokenizers; it warns about that.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in a test may depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import jax
import pytest

# Tests compile far more than they compute: LLVM's optimisations would take most of their time.
jax.config.update("jax_disable_most_optimizations", True)

# bf16 silently promoted to f32 (or int to float) is a bug in a cache: mixed dtypes must be cast where it is meant.
jax.config.update("jax_numpy_dtype_promotion", "strict")

MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 25_000

# Shapes compile, and a first compilation takes seconds: no deadline, few examples.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs take memory mappings, of which Linux grants a process some 65,000: the whole suite's would not
    fit, and the compiler crashes at the limit.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
