"""What a newcomer meets first: names, help on a narrow terminal, the demo, kept programs, honest numbers."""

import os
import re
import time
import tomllib
from pathlib import Path

import jax
import pytest
import typer
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.storage.compilation_cache import keep_programs
from tests.support.processes import python
from tests.support.tiny import prompt, tiny

ROOT = Path(__file__).parent.parent
NARROW = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
JAX_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")


def _commands(command=None, path=()):
    command = typer.main.get_command(cli.app) if command is None else command
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))


def test_the_version_is_the_projects():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ckv.__version__ == version
    assert python("-m", "clusterkv_jax", "--version").stdout.strip() == version


def test_dir_shows_public_names_alone():
    assert {name for name in dir(ckv) if not name.startswith("__")} == set(ckv.__all__)


def test_the_demos_text_holds_its_number():
    assert "amber-lantern is: 4821057." in ckv.demo_text()


@pytest.mark.parametrize("path", [path for path in _commands() if path != ("lm-eval",)], ids=" ".join)
def test_help_fits_a_narrow_terminal(path):
    """Neither cut at the edge, nor an example broken where it has no backslash."""
    result = CliRunner().invoke(cli.app, [*path, "--help"], env=NARROW)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    command = typer.main.get_command(cli.app)
    for name in path:
        command = command.commands[name]
    epilog = (getattr(command, "epilog", None) or "").splitlines()
    broken = [line for line in epilog if line and " " + re.sub(r"\[/?bold\]|\\(?=\[)", "", line) not in lines]
    assert broken == []


@pytest.mark.parametrize("name", ["methods", "models"])
def test_lists_fit_a_narrow_terminal(name):
    lines = CliRunner().invoke(cli.app, [name], env=NARROW).stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80


@pytest.fixture
def jax_cache(monkeypatch, tmp_path):
    """As if neither the tests nor the user had named a folder of compiled programs."""
    before = {name: getattr(jax.config, name) for name in JAX_CACHE}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "clusterkv_jax" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_unless_jax_was_told_otherwise(jax_cache, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", True)
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(jax_cache)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_a_folder_that_cannot_be_made_keeps_no_programs(jax_cache, tmp_path):
    (tmp_path / "clusterkv_jax").write_text("A file where the folder would be.")
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_loaded_model_keeps_its_programs(tmp_path):
    code = "import jax, clusterkv_jax as ckv; ckv.load('demo'); jax.jit(lambda x: x * 3 + 5)(1.0)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    python("-c", code, env=environment | {"XDG_CACHE_HOME": str(tmp_path)})
    assert list((tmp_path / "clusterkv_jax" / "programs").glob("*-cache"))


def test_times_of_a_first_call_leave_compiling_out():
    begin = time.perf_counter()
    stats = ckv.generate(tiny(), [prompt(0, 201)], max_new_tokens=3).stats
    seconds = time.perf_counter() - begin
    assert stats.compile_s > 0 < stats.ttft_s
    assert stats.ttft_s + stats.tpot_s * (stats.new_tokens[0] - 1) + stats.compile_s <= seconds


def test_a_text_asked_twice_is_counted_once():
    ask = {"method": ckv.CentroidKV(ckv.Budget(tokens=100)), "max_new_tokens": 2}
    one = ckv.generate(tiny(), [prompt(0, 201)], questions=[[5, 6]], **ask).stats
    two = ckv.generate(tiny(), [prompt(0, 201)] * 2, questions=[[5, 6], [7, 8]], **ask).stats
    assert (two.cache_bytes, two.full_cache_bytes) == (one.cache_bytes, one.full_cache_bytes)
    assert two.cache_bytes < two.full_cache_bytes


def test_the_table_says_what_share_of_the_text_is_kept(tmp_path):
    """Of a budget over unequal heads it is the mean, whatever is allocated."""
    (tmp_path / "text.txt").write_text("All visible objects, man, are but as pasteboard masks. " * 24)
    result = CliRunner().invoke(
        cli.app,
        f"generate --prompt-file {tmp_path / 'text.txt'} --question Who? --question Where? --method auto "
        "--cache-ratio 0.125 --max-new-tokens 1",
        env={"COLUMNS": "100"},
    )
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == ["auto"] and "%" in line]
    kept, tokens, share = re.search(r"(\d+) of (\d+) +([\d.]+)%", line).groups()
    assert abs(float(share) - 12.5) < 0.5
    assert abs(int(kept) / int(tokens) - 0.125) < 0.005
