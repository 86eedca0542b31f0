"""Settings of every test: eight fake CPU devices, quick compilation, strict dtypes, bounded property tests."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# Before jax is imported: its platform and the number of its host devices are fixed by then.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Fusion emitters take most of a small program's compilation, and one of several parts costs more than it saves where
# workers share the cores; an XLA that does not know a flag ends the process.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
        * version("jaxlib").startswith("0.10."),
    ]
).strip()
# Tests, and the commands that they start, compile far more than they compute: LLVM's optimisations would take most of
# their time.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Threads of XLA for all fake devices: by default one each. A device that waits in two collectives at once then leaves
# another without a thread, and none of them ends.
os.environ.setdefault("NPROC", "64")
# Commands called in tests keep their programs where the tests keep theirs, not in the user's folder.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache")
# Workers of pytest-xdist fork from a process that has used tokenizers; it warns about that.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in a test may depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import jax
import jaxtyping
import pytest

from tests.support import typechecker

# Workers, and the next run, take from each other what one of them compiled.
jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ["XDG_CACHE_HOME"], "programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# bf16 silently promoted to f32 (or int to float) is a bug in a cache: mixed dtypes must be cast where it is meant.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Shapes are broadcast where that is written, not by the number of their dimensions.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes and drops millions of small objects. Looking for circles among them takes a quarter of the suite's time,
# so that is done between modules, when enough objects have come together.
gc.disable()
MOST_OBJECTS = 5_000_000

MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 25_000

# Shapes compile, and a first compilation takes seconds: no deadline, few examples.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# `make fuzz`: every kind of wrong input as often as it takes to trust the rules.
hypothesis.settings.register_profile(
    "large", deadline=None, max_examples=10_000, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--untyped", action="store_true", help="do not execute annotations: starts and traces faster")


def pytest_configure(config):
    """Annotations are executed: a shape letter that is wrong, or two that disagree, fail the test that meets them."""
    if not config.getoption("--untyped"):
        jaxtyping.install_import_hook("clusterkv_jax", f"{typechecker.__name__}.check")


def pytest_unconfigure():
    """Pytest now looks ten times for files that nobody closed: millions of objects are gone through once."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs take memory mappings, of which Linux grants a process some 65,000: the whole suite's would not
    fit, and the compiler crashes at the limit.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
    elif gc.get_count()[0] > MOST_OBJECTS:
        gc.collect()


@pytest.fixture(autouse=True)
def _what_users_may_pass(request):
    """Tests of wrong arguments meet the library's own errors: its users run without the type checker."""
    wrong = request.node.get_closest_marker("wrong_arguments") is not None
    # A mesh traces the same functions with the same shapes once more.
    again = request.node.path.parent.name == "mesh"
    jaxtyping.config.update("jaxtyping_disable", wrong or again)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
