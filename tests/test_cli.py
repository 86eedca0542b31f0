"""The `clusterkv` command: one sentence for every mistake, tables for people, JSON for programs."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.cli.terminal import progress_bar
from clusterkv_jax.presets import list_presets
from tests.support.byte_model import BYTES, byte_folder
from tests.support.processes import python

ROOT = Path(__file__).parent.parent
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose tokens are bytes, with a chat template."""
    return byte_folder(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture
def text(tmp_path):
    """A prompt of 300 tokens, bytes that is."""
    file = tmp_path / "text.txt"
    file.write_text(("All visible objects, man, are but as pasteboard masks. " * 6)[:300])
    return file


def _run(*arguments, **options):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], **options)


def _generate(model, text, *arguments, **options):
    """The text as it is; what reads it in the chat template calls `_chat`."""
    return _chat(model, text, "--raw", *arguments, **options)


def _chat(model, text, *arguments, **options):
    return _run("generate", "--model", model, "--prompt-file", text, "--max-new-tokens", 4, *arguments, **options)


def test_help_shows_examples():
    result = _run("generate", "--help")
    assert result.exit_code == 0
    assert "clusterkv generate --prompt-file book.txt" in result.stdout
    assert "--prompt-file two.txt \\ --prompt-file three.txt" in " ".join(result.stdout.split())


def test_help_needs_nothing_heavy():
    code = """
import sys
from typer.testing import CliRunner
import clusterkv_jax
from clusterkv_jax import cli

names = "generate methods calibrate evaluate join compare inspect".split()
for command in [[], *([name] for name in names), ["inspect", "keys"], ["inspect", "recall"]]:
    assert CliRunner().invoke(cli.app, [*command, "--help"]).exit_code == 0, command
heavy = "jax jaxlib jaxtyping numpy yaml msgspec transformers tokenizers huggingface_hub torch matplotlib".split()
heavy += ["optax", "flax"]
print(*(set(heavy) & sys.modules.keys()))
"""
    assert python("-c", code).stdout.strip() == ""


def test_methods_are_listed_one_line_each():
    result = _run("methods", env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line.split()[0] for line in lines] == ["name", *list_presets()]
    assert len(lines) > 15
    assert "…" not in result.stdout


def test_one_method_streams_its_text_and_ends_with_a_table(model, text):
    result = _generate(model, text, "--method", "centroidkv", "--cache-ratio", 0.5)
    assert result.exit_code == 0, result.stderr
    as_json = _generate(model, text, "--method", "centroidkv", "--cache-ratio", 0.5, "--json")
    answer = json.loads(as_json.stdout)["runs"][0]["texts"][0]
    assert result.stdout.startswith(answer)
    for part in ("KV pairs", "50.0%", "cache MB", "TTFT", "tokens/s", "150 of 300"):
        assert part in result.stdout[len(answer) :]


def test_two_methods_and_two_questions_stand_side_by_side(model, text):
    arguments = ("--method", "full", "--method", "centroidkv", "--cache-tokens", 100, "--question", "Who?")
    result = _generate(model, text, *arguments, "--question", "Where?", env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    for part in ("Who?", "Where?", "full", "centroidkv", "100 of 300", "300 of 300"):
        assert part in result.stdout


def test_several_texts_are_answered_by_an_engine(model, text, tmp_path):
    other, ways = tmp_path / "other.txt", ("--method", "centroidkv", "--cache-ratio", 0.5, "--slots", 2)
    other.write_text(text.read_text()[::-1][:200])
    both = _generate(model, text, "--prompt-file", other, *ways, "--question", "Who?", "--question", "Where?", "--json")
    assert both.stderr == ""
    content = json.loads(both.stdout)
    alone = [
        json.loads(_generate(model, file, *ways, "--question", question, "--json").stdout)["runs"][0]["texts"][0]
        for file, question in ((text, "Who?"), (text, "Where?"), (other, "Who?"), (other, "Where?"))
    ]
    assert content["files"] == [str(text), str(other)]
    (run,) = content["runs"]
    assert run["texts"] == alone
    assert [stats["prompt_tokens"] for stats in run["stats"]] == [[300], [300], [200], [200]]
    assert (run["engine"]["finished"], run["engine"]["slots"]) == (4, 2)
    whole = json.loads(_generate(model, text, "--prompt-file", other, "--json").stdout)["runs"][0]["stats"]
    assert {stats["cache_bytes"] / stats["full_cache_bytes"] for stats in whole} == {1}
    shown = _generate(model, text, "--prompt-file", other, *ways, env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.stderr
    for part in ("other.txt", "100-150 of 200-300", "tokens/s"):
        assert part in shown.stdout
    assert "0 of 2 slots" in shown.stderr


def test_json_is_the_only_output_and_holds_everything(model, text):
    result = _generate(model, text, "--method", "full", "--method", "centroidkv", "--cache-ratio", 0.5, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert result.stderr == ""
    full, half = content["runs"]
    assert [full["name"], half["name"]] == ["full", "centroidkv"]
    assert half["stats"]["kept_rows"] == [[[150]]]
    assert half["stats"]["cache_bytes"] < full["stats"]["cache_bytes"] == full["stats"]["full_cache_bytes"]
    assert "ratio=0.5" in half["method"]


def test_standard_input_and_the_script(model, text):
    command = [ROOT / "scripts" / "generate.py", "--model", model, "--prompt-file", "-", "--raw", "--json"]
    process = python(*command, "--max-new-tokens", 2, input=text.read_text())
    assert json.loads(process.stdout)["runs"][0]["stats"]["prompt_tokens"] == [300]


def test_the_authors_way_to_draw(model, text, tmp_path):
    folder = shutil.copytree(model, tmp_path / "m")
    stated = {"do_sample": True, "temperature": 5.0, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    ways = ((), ("--sampling", "model"), ("--temperature", 5.0, "--top-p", 0.9))
    greedy, authors, same = (
        json.loads(_generate(folder, text, *way, "--json").stdout)["runs"][0]["texts"] for way in ways
    )
    assert authors == same != greedy
    for way, message in ((("model", "--top-k", 5), "Give --sampling model, or"), (("best",), "--sampling must be")):
        result = _generate(folder, text, "--sampling", *way)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr


def test_chat_cuts_the_template_between_text_and_question(model, text):
    for asked in ((), ("--chat",)):  # by default, and as it was asked for before
        result = _chat(model, text, *asked, "--question", "Who?", "--json")
        assert result.exit_code == 0, result.stderr
        run = json.loads(result.stdout)["runs"][0]
        assert run["stats"]["prompt_tokens"] == [len("<user>") + 300]
        assert run["stats"]["question_tokens"] == [len("\n\nWho?</user><assistant>")]
        assert run["finish_reasons"] == ["length"]
    # The same in Python.
    result = ckv.generate(
        ckv.load(model), [text.read_text()], questions=["Who?"], chat=True, system="Be brief.", max_new_tokens=4
    )
    assert result.stats.question_tokens == run["stats"]["question_tokens"]
    assert result.stats.prompt_tokens == [len("<system>Be brief.</system><user>") + 300]


def test_methods_and_budgets_are_repeated_or_stand_between_commas(model, text):
    ways = (
        ["--method", "full", "--method", "centroidkv", "--budget", "0.5", "--budget", "100"],
        ["--methods", "full,centroidkv", "--budgets", "0.5,100"],
    )
    for arguments in ways:
        result = _generate(model, text, *arguments, "--max-new-tokens", 2, "--json")
        assert result.exit_code == 0, result.stderr
        runs = json.loads(result.stdout)["runs"]
        assert [run["name"] for run in runs] == ["full", "centroidkv 0.5", "centroidkv 100"]
        assert np.unique(runs[2]["stats"]["kept_rows"]).tolist() == [100]


def test_brackets_of_a_name_are_no_markup(model, text, tmp_path):
    """A terminal's library takes [/b] for the end of something, and [b] for bold."""
    file = tmp_path / "[/b]" / "[b].yaml"
    file.parent.mkdir(parents=True)
    file.write_text("method: SnapKV\ndescription: Some rows\nsource: a test\nsettings: {window: 8}")
    both = ("--method", file, "--method", "full", "--cache-ratio", 0.5)
    result = _generate(model, text, *both, "--prompt-file", text, env={"COLUMNS": "1000"})
    assert result.exit_code == 0, result.stderr
    assert str(file) in result.stdout
    assert f"{file}: " in result.stderr


def test_a_model_is_named_once(model, text):
    command = ["inspect", "keys", "--text", str(text), "--tokens", "256"]
    for names in ([], [str(model), "--model", str(model)]):
        _assert_sentence(CliRunner().invoke(cli.app, [*command, *names]), "One model is needed, as MODEL or as --model")


def test_a_picture_of_the_full_cache_takes_no_budget(model, text):
    command = ["inspect", "keys", str(model), "--text", str(text), "--methods", "full", "--budget", "0.5"]
    _assert_sentence(CliRunner().invoke(cli.app, command), "--budgets 0.5 needs a method that takes a budget")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budget", "0.5", "--cache-ratio", "0.5"], "Give --budget, --cache-ratio or --cache-tokens, not several"),
        (["--method", "centroid"], "Unknown method or preset 'centroid'; known: adakv, adakv-kvpress, auto, cam,"),
        (["--method", "centroidkv"], "--method centroidkv needs --cache-ratio or --cache-tokens."),
        (["--cache-ratio", "0.5"], "--method full keeps the whole cache and takes no --cache-ratio or --cache-tokens."),
        (["--method", "centroidkv", "--cache-ratio", "0.5", "--cache-tokens", "9"], "not both (got 0.5 and 9)"),
        (["--method", "centroidkv", "--cache-ratio", "-1"], "Budget ratio must be a number above 0, got -1.0"),
        (["--method", "centroidkv", "--cache-tokens", "0"], "Budget tokens must be a whole number of at least 1"),
        (["--method", "centroidkv", "--cache-tokens", "80"], "more than sinks + recent = 16 + 64"),
        (["--method", "nowhere.yaml"], "nowhere.yaml"),
        (["--max-new-tokens", "0"], "got 0"),
        (["--max-new-tokens", "300"], "512"),
        (["--prefill-chunk", "0"], "got 0"),
        (["--temperature", "-1"], "temperature must be a number of at least 0, got -1.0"),
        (["--top-k", "-2"], "top_k must be a whole number of at least 1, or None, 0 or -1 for all tokens, got -2"),
        (["--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
        (["--min-p", "2"], "min_p must be between 0 and 1, got 2.0"),
        (["--stop", ""], "stop"),
        (["--temperature", "1e-40"], "temperature must be 0, which is greedy, or at least 1e-30, got 1e-40"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 4294967295, got -1."),
        (["--seed", "99999999999999999999"], "--seed must be a whole number from 0 to 4294967295, got 9999"),
        (["--method", "centroidkv", "--cache-ratio", "25"], "rows are tokens= (--cache-tokens), got 25.0"),
        (["--question", ""], "empty"),
    ],
)
def test_bad_options_get_one_sentence(model, text, arguments, sentence):
    _assert_sentence(_generate(model, text, *arguments), sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "The prompt is empty"), (b" \n", "The prompt is empty"), (b"ab\xff", "is not UTF-8: byte 2 is 0xff")],
)
def test_bad_prompt_files_get_one_sentence(model, tmp_path, content, sentence):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    _assert_sentence(_generate(model, file), sentence)


def test_missing_things_get_one_sentence(model, text, tmp_path):
    _assert_sentence(_generate(model, tmp_path / "none.txt"), "none.txt")
    _assert_sentence(_generate(model, tmp_path), "directory")
    _assert_sentence(_generate(tmp_path / "no-model", text), "no-model")
    _assert_sentence(_generate(tmp_path, text), "config.json")
    assert _run("generate", "--model", model).exit_code == 2


def test_chat_without_a_template_is_an_error(model, text, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    _assert_sentence(_chat(tmp_path, text, "--chat"), "--chat needs a model whose tokenizer has a chat template")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", json.dumps({**BYTES, "num_hidden_layers": 10**9}), "'num_hidden_layers': Expected int <= 1024"),
        ("config.json", json.dumps({**BYTES, "rms_norm_eps": -1}), "'rms_norm_eps': Expected float > 0.0 (-1)."),
        ("config.json", "[" * 200_000, "config.json is nested deeper than 32 levels."),
        (
            "generation_config.json",
            '{"eos_token_id": "x"}',
            "'eos_token_id': Expected int | array | null, got str ('x').",
        ),
        ("tokenizer.json", "{}", "tokenizer.json makes no tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: Expected object, got array ([])."),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "The model's chat template fails: "),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template"),
    ],
)
def test_a_damaged_model_gets_one_sentence(model, text, tmp_path, file, content, sentence):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).write_text(content)
    _assert_sentence(_chat(tmp_path, text, "--chat", "--question", "Who?"), sentence)


def test_an_interrupt_ends_quietly(model, text, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("clusterkv_jax.generate", interrupted)
    result = _generate(model, text)
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [TypeError("a fault\nof ours"), EOFError("ended early"), KeyError("name")])
def test_what_nobody_foresaw_is_shown_in_whole_only_to_who_asks(model, text, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("clusterkv_jax.generate", fails)
    _assert_sentence(_generate(model, text, "--json"), f"Error: {type(error).__name__}, which nothing foresaw: ")
    raised = _generate(model, text, "--json", "--debug").exception
    assert error in (raised, raised.__cause__)


def test_every_command_shows_tracebacks_with_debug():
    group = typer.main.get_command(cli.app).commands
    commands = {**group, **group["inspect"].commands}
    del commands["inspect"]
    assert len(commands) >= 8
    without = [name for name, c in commands.items() if not any("--debug" in option.opts for option in c.params)]
    assert without == []


def test_a_budget_smaller_than_the_sinks_of_a_host_store_gets_one_sentence(model, text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("method: ClusterKV\ndescription: mine\nsource: mine\nsettings: {sinks: 16, store: host}\n")
    result = _generate(model, text, "--method", file, "--cache-tokens", 8)
    _assert_sentence(result, "a prompt of 300 tokens has a budget of 8 rows, which must be more than sinks = 16.")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine.yaml", "text.txt"]


@pytest.mark.parametrize("count", [1, 2])
def test_texts_that_are_too_short_for_their_budget_are_kept_whole(model, tmp_path, count):
    """By one call, and by the engine that reads several."""
    short = tmp_path / "short.txt"
    short.write_text("Call me Ishmael.")
    files = ["--prompt-file", short] * (count - 1)
    method = ["--method", "centroidkv", "--cache-ratio", 0.25, "--json"]
    refused = _generate(model, short, *files, *method)
    assert refused.exit_code == 2
    assert "tokens has a budget of" in refused.output
    kept = _generate(model, short, *files, *method, "--keep-short")
    assert kept.exit_code == 0, kept.output
    whole = _generate(model, short, *files, "--json")
    assert json.loads(kept.stdout)["runs"][0]["texts"] == json.loads(whole.stdout)["runs"][0]["texts"]


@pytest.mark.parametrize(
    ("module", "name"), [("decoding.prefilling", "_read_layer"), ("generation.generate", "decode_loop")]
)
def test_too_little_memory_gets_one_sentence(model, text, monkeypatch, module, name):
    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory trying to allocate 2.50GiB.\nSee above.")

    exhausted.lower = exhausted  # a program is compiled before it runs
    monkeypatch.setattr(import_module(f"clusterkv_jax.{module}"), name, exhausted)
    doing = "reading 1 x 320" if name == "_read_layer" else "generating from 1 x 300"
    result = _generate(model, text, "--json")
    _assert_sentence(
        result, f"Out of device memory while {doing} tokens (2.5 GiB were asked for); take a smaller batch,"
    )


def _assert_sentence(result, sentence):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_log_has_lines_of_progress(monkeypatch, capsys):
    monkeypatch.setattr("clusterkv_jax.cli.terminal.PACE_SECONDS", -1)
    with progress_bar(1200, "layers") as show:
        for done in (300, 600, 1200):  # an earlier run did the first 300
            show(done)
    assert capsys.readouterr().err == "600 of 1,200 layers · 0 s left\n1,200 of 1,200 layers · 0 s left\n"
