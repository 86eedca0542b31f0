"""What a wheel and a source archive carry: the linked packages and their data, nothing that shadows other libraries."""

import importlib
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import python

ROOT = Path(__file__).parents[2]
LINKED = ("configs", "kernels", "models")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Names in the wheel and in the sdist, both built from a copy of the checkout (building litters the tree)."""
    folder = tmp_path_factory.mktemp("build")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("clusterkv_jax", *LINKED):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
    python("-c", build, cwd=folder)
    (wheel,) = (folder / "out").glob("*.whl")
    (sdist,) = (folder / "out").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
    with tarfile.open(sdist) as opened:
        in_sdist = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    return in_wheel, in_sdist


def _expected():
    """Every module and data file of the checkout, under its name in the package."""
    suffixes = {".py", ".yaml", ".json", ".safetensors", ".txt", ".md", ".jinja", ".sh", ".sbatch"}
    return {
        f"clusterkv_jax/{path.relative_to(ROOT / folder if folder == 'clusterkv_jax' else ROOT)}"
        for folder in ("clusterkv_jax", *LINKED)
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    } | {"clusterkv_jax/py.typed", "clusterkv_jax/configs/pods/Dockerfile"}


@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "sdist"])
def test_archives_hold_every_module_and_data_file(archives, kind):
    assert _expected() - archives[kind] == set()


def test_the_wheel_installs_one_top_level_name(archives):
    tops = {name.split("/")[0] for name in archives[0]}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"clusterkv_jax"}


@pytest.mark.parametrize("name", LINKED)
def test_linked_packages_resolve(name):
    link = ROOT / "clusterkv_jax" / name
    assert link.is_symlink(), (
        f"clusterkv_jax/{name} must be a link to ../{name}; on Windows clone with symlinks enabled"
    )
    assert str(link.readlink()) == f"../{name}"
    importlib.import_module(f"clusterkv_jax.{name}")


def test_the_command_is_installed():
    assert "generate" in python("-m", "clusterkv_jax.cli", "--help").stdout


# --- our folder `kernels/` beside the package of that name which transformers looks for ---


def test_kernels_has_no_module_of_its_own():
    """transformers imports a package called `kernels` wherever it finds one; without __init__.py it finds none."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


_LOOKED_FOR = """
def __getattr__(name):
    return type(name, (), {})
"""
_IMPORT = """
import sys
import transformers
from transformers import AutoTokenizer
from transformers.utils.import_utils import is_kernels_available
import kernels
ours = [m for m in sys.modules.values() if (getattr(m, "__file__", None) or "").startswith(sys.argv[1])]
assert not ours, ours
assert "biased_attention" not in vars(kernels)
print(is_kernels_available(), kernels.__file__)
"""


def _import_transformers(*path: Path) -> str:
    """Import transformers from the repository's root, as a user who works there does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return python("-c", _IMPORT, ROOT / "kernels", cwd=ROOT, env=environment).stdout.strip()


def test_our_kernels_stay_inert_for_transformers(tmp_path):
    assert _import_transformers().endswith("None")  # a namespace without a file: nothing of ours was executed
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(_LOOKED_FOR)
    assert _import_transformers(tmp_path) == f"True {tmp_path / 'kernels' / '__init__.py'}"
