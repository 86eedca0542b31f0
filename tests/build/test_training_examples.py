"""The examples of training run in small: what they train gets better, and they print what their pages tell of."""

import importlib.util
import os
import re

import pytest

from tests.support.processes import python
from tests.support.scripts import SCRIPTS

pytest.importorskip("optax", reason="training: pip install 'clusterkv-jax[train]'")
pytest.importorskip("flax", reason="models of Flax: pip install 'clusterkv-jax[flax]'")

NEEDS_TUNIX = pytest.mark.skipif(
    importlib.util.find_spec("tunix") is None, reason="trains a model of google-tunix: pip install google-tunix"
)
# Programs are compiled as tests compile theirs, and kept beside them.
COMPILATION = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_COMPILATION_CACHE_DIR": os.path.join(os.environ["XDG_CACHE_HOME"], "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def lines_of(example, *arguments):
    """What an example prints."""
    return python(SCRIPTS / "examples" / example, *arguments, env=os.environ | COMPILATION).stdout.splitlines()


def test_a_cartridge_comes_nearer_to_the_full_cache(tmp_path):
    sizes = ["--tokens", 256, "--facts", 2, "--pool", 8, "--steps", 8, "--batch", 8]
    title, _, progress, row = lines_of("cartridge.py", "--seeds", 0, *sizes, "--output", tmp_path)
    assert re.fullmatch(r"  step    8  KL \d+\.\d{3} nats", progress)
    names, cells = (line.strip("| ").split(" | ") for line in (title, row))
    found = dict(zip(names, map(float, cells), strict=True))
    assert found["KL after"] < 0.9 * found["KL before"]
    assert all(found[name] in (0, 1, 2) for name in ("full cache", "rows as they are", "trained"))
    assert (tmp_path / "seed-0.safetensors").exists()


@pytest.mark.parametrize("model", ["toy", pytest.param("tunix", marks=NEEDS_TUNIX)])
def test_rollouts_from_a_compressed_cache_earn_more(model):
    lines = lines_of("grpo.py", "--model", model, "--steps", 20)
    form = re.compile(r"step +(\d+)  reward (\d\.\d{3})  loss [+-]\d\.\d{3}  #+")
    steps, rewards = zip(*(form.fullmatch(line).groups() for line in lines), strict=True)
    assert steps == ("1", "10", "20")
    assert sorted(rewards) == list(rewards)
    assert float(rewards[-1]) > 0.5  # a guess is right in one of four
