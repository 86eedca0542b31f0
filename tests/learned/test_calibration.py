"""`clusterkv calibrate`: what it measures, what it writes, and that methods take it."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import calibration, cli, observation
from clusterkv_jax.checkpoints.loading import calibrated
from clusterkv_jax.presets import described, preset
from tests.support.tiny import prompt, tiny

TEXT = Path(__file__).parents[2] / "configs" / "demo" / "mast_head.txt"
HALF = ckv.Budget(ratio=0.5)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def test_outliers_are_the_largest_shares_and_whole_layers():
    shares = np.asarray([[0.1, 0.2], [0.9, 0.3], [0.3, 0.4]])
    assert calibration.choose_outliers(shares, 0.5) == ((1, 0), (1, 1), (2, 1))  # of two equal ones the first
    assert calibration.choose_outliers(shares, 0.5, (0,)) == ((0, 0), (0, 1), (1, 0))
    assert calibration.choose_outliers(shares, 0.04) == ()
    with pytest.raises(ValueError, match="heads of 2 whole layers are 4, more than the 3 outlier heads"):
        calibration.choose_outliers(shares, 0.5, (0, 2))
    with pytest.raises(ValueError, match="no layer 3 to keep whole: the model has 3"):
        calibration.choose_outliers(shares, 0.5, (3,))


def test_a_calibration_is_the_mean_over_sequences():
    pieces, calls = [prompt(1, 160), prompt(2, 160)], []
    both = observation.calibrate(tiny(), pieces, ratio=0.5, progress=lambda *now: calls.append(now))
    each = [observation.calibrate(tiny(), [piece], ratio=0.5) for piece in pieces]
    mean = np.mean([one.outlier_share for one in each], axis=0)
    np.testing.assert_allclose(both.outlier_share, mean, atol=1e-4)
    assert np.ptp(both.outlier_share) > 0
    assert calls == [(i + 1, 4) for i in range(4)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The demo model's calibration, from two short pieces of its chapter."""
    file = tmp_path_factory.mktemp("calibration") / "demo.yaml"
    result = run(
        *("calibrate", "demo", "--data", TEXT, "--output", file, "--outliers", 0.1),
        *("--sequences", 2, "--tokens", 256, "--chunk", 64),
    )
    assert result.exit_code == 0, result.output
    assert "1 of 12 heads are outliers, from 2 pieces of 256 tokens" in result.stdout
    return file


def test_the_file_says_what_was_measured(file):
    assert {path.name for path in file.parent.iterdir()} == {"demo.yaml", "demo.png"}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    profile = calibration.read(file)
    assert calibration.to_yaml(profile) == file.read_text()
    shares = np.asarray(profile.outlier_share)
    assert profile.outlier_heads == (tuple(np.unravel_index(shares.argmax(), shares.shape)),)
    steps = np.asarray(profile.head_shares) / calibration.SHARE_STEP
    assert (steps == np.rint(steps)).all()
    assert (steps > 0).all()
    assert profile.settings["tokens"] == 256


def test_what_could_not_be_read_is_not_written(file, tmp_path, monkeypatch):
    """Heads of the largest models fit: OPT-66B has 4,608, Qwen1.5-72B 5,120."""
    assert calibration.MOST_NUMBERS > 1.5 * 160 * 5120
    profile = calibration.read(file)
    surrogate = tuple({"weights": np.ones((64, 2), np.float32), "bias": np.ones(2, np.float32)} for _ in range(6))
    monkeypatch.setattr(calibration.files, "MOST_NUMBERS", len(file.read_text()) - 1)
    for name in ("new.yaml", "new.safetensors"):
        with pytest.raises(ValueError, match=r"of demo has [\d,]+ bytes of numbers, .* nothing was written to .*new\."):
            calibration.write(tmp_path / name, replace(profile, surrogate=surrogate))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(calibration.files, "MOST_NUMBERS", len(file.read_text()))
    calibration.write(tmp_path / "new.yaml", profile)
    assert calibration.read(tmp_path / "new.yaml") == profile


def test_a_fingerprint_tells_surrogates_apart(file):
    profile = calibration.read(file)
    one, other = (({"weights": np.full((64, 2), x, np.float32)},) * 6 for x in (1, 2))
    marks = [calibration.fingerprint(replace(profile, surrogate=x)) for x in (None, one, other, one)]
    assert len(set(marks)) == 3
    assert marks[1] == marks[3]


def test_a_method_is_described_with_the_calibration_that_its_answers_depend_on(file):
    """A file without a surrogate leaves the model the one that it has, which is told apart too."""
    rows = ckv.Budget(ratio=0.5)
    profile = replace(calibration.read(file), surrogate=None)
    demo = ckv.load("demo")
    other = [{name: -x for name, x in layer.items()} for layer in demo.calibration.surrogate]
    models = [
        demo,
        calibrated(demo, profile),
        calibrated(calibrated(demo, replace(demo.calibration, surrogate=tuple(other))), profile),
    ]
    assert len({described(model, ckv.KVzap(rows)) for model in models}) == 3
    assert {described(model, ckv.SnapKV(rows)) for model in models} == {repr(ckv.SnapKV(rows))}
    assert described(replace(demo, calibration=None), ckv.KVzap(rows)) == repr(ckv.KVzap(rows))


def test_presets_take_it(file):
    profile = calibration.read(file)
    outliers = profile.outlier_heads
    assert preset("chelsea-llama3", HALF, profile) == preset("chelsea-llama3", HALF, outlier_heads=outliers)
    shares = profile.kept_shares(0.5)
    assert preset("snapkv", HALF, profile) == ckv.SnapKV(ckv.Budget(ratio=0.5, shares=shares))
    assert preset("gravitykv", HALF, profile).budget.shares == shares
    assert preset("snapkv", ckv.Budget(tokens=128), profile).budget.shares == shares  # half of the pieces
    assert preset("adakv", HALF, profile).budget.shares == tuple(float(np.mean(layer)) for layer in shares)
    unscored = replace(profile, least_scores=None)
    assert preset("snapkv", HALF, unscored).budget.shares == profile.head_shares
    assert preset("gravitykv", HALF, unscored).budget.shares == profile.cluster_shares
    mine = file.with_name("mine.yaml")
    mine.write_text("method: Chelsea\ndescription: mine\nsource: mine\ncalibration: demo.yaml\n")
    assert preset(str(mine), HALF) == ckv.Chelsea(HALF, outlier_heads=outliers)
    mine.unlink()
    with pytest.raises(ValueError, match="Full has no budget"):
        preset("full", None, profile)


def test_heads_that_cluster_badly_get_more_rows():
    """In steps of a quarter of the mean, at least one, whatever layer they stand in."""
    profile = calibration.Calibration("mine", ((0.0, 0.9), (0.5, 0.4)), (), ((1.0, 1.0), (1.0, 1.0)), {})
    assert profile.cluster_shares == ((0.25, 1.75), (1.0, 1.0))
    shares = preset("gravitykv-demo", HALF).budget.shares
    assert np.shape(shares) == (6, 2)
    assert shares == preset("centroidkv-demo", HALF).budget.shares


def test_the_command_answers_with_it(file, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT.read_text()[:3000])
    result = run(
        *("generate", "--prompt-file", tmp_path / "text.txt", "--max-new-tokens", 1, "--json"),
        *("--method", "chelsea-llama3", "--cache-ratio", 0.25, "--calibration", file),
    )
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)["runs"][0]["stats"]
    tokens = stats["prompt_tokens"][0]
    whole = [(layer, rows[0].index(tokens)) for layer, rows in enumerate(stats["kept_rows"]) if tokens in rows[0]]
    assert tuple(whole) == calibration.read(file).outlier_heads
    assert sum(sum(rows[0]) for rows in stats["kept_rows"]) <= 12 * int(0.25 * (tokens + 1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere.txt"], "--data nowhere.txt is no file, no folder and no hub data set"),
        (["--data", TEXT, "--tokens", 8000], "No text has 8000 tokens, the longest"),
        (["--data", TEXT, "--tokens", 10000], "--tokens 10000 exceed the model's 8192 positions"),
        (["--data", TEXT, "--tokens", 128], "--ratio 0.25 of --tokens 128 is 32 rows, and AdaKV needs more than its"),
        (["--data", TEXT, "--seed", -1], "--seed"),
        (["--data", TEXT, "--threshold", "nan"], "--threshold must be between -1 and 1, got nan"),
        (["--data", TEXT, "--whole-layer", 9], "no layer 9 to keep whole: the model has 6"),
        (["--data", TEXT, "--chunk", 7], "--chunk must be an even number of rows, got 7"),
        (["--data", TEXT, "--ratio", 1.5], "--ratio must be between 0 and 1, got 1.5"),
        (["--data", TEXT, "--output", "here.txt"], "--output must be a .safetensors or a .yaml file, got here.txt"),
        (["--data", TEXT, "--output", "no/such/folder.yaml"], "The folder no/such does not exist"),
    ],
)
def test_mistakes_are_named_in_one_sentence(arguments, said):
    result = run("calibrate", "demo", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (gzip.compress(b"text" * 100)[:-9], "torn.txt.gz is not a whole gzip file"),
        (b"text", "torn.txt.gz is not a whole gzip file: Not a gzipped file"),
        (gzip.compress(b"a\xff"), "torn.txt.gz is not UTF-8 text: byte 1 is 0xff"),
        (gzip.compress(bytes(2**27 + 1), 1), "torn.txt.gz is larger than 128 MiB"),
    ],
    ids=["torn", "plain", "bytes", "large"],
)
def test_a_packed_text_that_cannot_be_read_is_named(raw, said, tmp_path):
    (tmp_path / "torn.txt.gz").write_bytes(raw)
    result = run("calibrate", "nowhere/at-all", "--data", tmp_path / "torn.txt.gz")
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


def test_without_matplotlib_a_line_says_that_the_picture_is_left_out(monkeypatch, tmp_path):
    def reached(*_, **__):
        raise ValueError("It works.")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(observation, "calibrate", reached)
    result = run("calibrate", "demo", "--data", TEXT, "--tokens", "512", "--output", tmp_path / "x.yaml")
    assert "No picture is drawn. Drawing the map of layers and heads needs the package 'matplotlib'" in result.stderr
    assert "It works." in result.stderr


def test_an_interrupt_leaves_nothing_behind(monkeypatch, tmp_path):
    def stopped(*_, progress, **__):
        progress(1, 12)
        raise KeyboardInterrupt

    monkeypatch.setattr(observation, "calibrate", stopped)
    result = run("calibrate", "demo", "--data", TEXT, "--tokens", 256, "--output", tmp_path / "x.yaml")
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_how_long_it_takes_and_counts_pieces(monkeypatch, tmp_path):
    now, asked = [0.0], []

    def measured(_, pieces, *, progress, **__):
        asked.append((len(pieces), len(pieces[0])))
        for done in (1, 2, 3, 12 * len(pieces)):
            now[0] += 50
            progress(done, 12 * len(pieces))
        raise KeyboardInterrupt

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(observation, "calibrate", measured)
    lines = []
    for quick in ([], ["--quick"]):
        (tmp_path / "book.txt").write_text(TEXT.read_text() * 4)
        result = run("calibrate", "demo", "--data", tmp_path / "book.txt", "--output", tmp_path / "x.yaml", *quick)
        lines.append(result.stderr.splitlines())
    assert asked == [(3, 4096), (4, 2048)]
    assert "About 30 minutes for 3 pieces of 4,096 tokens; --quick takes 20. Stopped, it goes on" in "\n".join(lines[0])
    assert "About 40 minutes for 4 pieces of 2,048 tokens. Stopped, it goes on" in "\n".join(lines[1])
    assert [line[0] for line in lines[1] if "of 4 pieces ·" in line] == ["0", "0", "4"]


def test_what_a_stopped_run_leaves_is_small_and_ends_as_an_unbroken_one(file, monkeypatch, tmp_path):
    model, state = ckv.load("demo"), tmp_path / "state"
    ids = model.tokenizer.encode(TEXT.read_text())
    pieces = [ids[:256], ids[256:512]]

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(observation, "SAVE_SECONDS", 0)
    monkeypatch.setattr(observation, "SAVE_EACH", 0)
    with pytest.raises(KeyboardInterrupt):
        observation.calibrate(model, pieces, chunk=64, progress=stop, resume=state)
    columns = model.config.hidden_size + 1 + model.config.num_kv_heads
    scores = 2 * observation.SAMPLE * model.config.num_kv_heads
    assert state.stat().st_size < 6 * (columns**2 + scores) * 4 + 10_000
    resumed = observation.calibrate(model, pieces, chunk=64, resume=state)
    assert not state.exists()
    whole = observation.calibrate(model, pieces, chunk=64)
    assert calibration.fingerprint(resumed) == calibration.fingerprint(whole)


def test_no_folder_of_the_machine_is_written(tmp_path):
    (tmp_path / "my-llama").mkdir()
    pieces = [prompt(1, 160)]
    for name, said in ((str(tmp_path / "my-llama"), "my-llama"), ("owner/name", "owner/name")):
        assert observation.calibrate(replace(tiny(), name=name), pieces, ratio=0.5).model == said


def test_files_that_are_no_calibration_and_other_models(file, tmp_path):
    profile = calibration.read(file)
    with pytest.raises(ValueError, match=r"of demo, 6 layers of 2 KV heads; this model has 2 of 2"):
        profile.check(tiny().config)
    other, text = tmp_path / "other.yaml", file.read_text()
    for missing in (tmp_path / "none", other):
        with pytest.raises(FileNotFoundError, match=f"There is no calibration at {missing}"):
            calibration.read(missing)
    for content, said in (
        ("a: [", "other.yaml, line 1: expected the node content"),
        ("[demo]", "Expected keys and values in .*other.yaml"),
        ("model: demo", "other.yaml: Object missing required field outlier_share"),
        (text.replace("outlier_heads:\n", "outlier_heads: []\nx:\n"), "Unknown key 'x' in .*allowed: model, "),
        (text.replace("- [", "- [x, ", 1), "field 'outlier_share.0.0': Expected float, got str \\('x'\\)"),
        (text.replace("- [", "- [0.5, ", 1), "field 'outlier_share': A number is needed for each of 3 heads in 6"),
        (text.replace("- [", "- [7, ", 1), "field 'outlier_share.0.0': Expected float <= 1.0 \\(7\\)"),
        (text + "model: x\n", "line [0-9]+: The key 'model' stands twice"),
        (text.replace("outlier_heads:\n- [", "outlier_heads:\n- [9, 0]\n- ["), "6 layers of 2 heads, got \\[9, 0\\]"),
    ):
        other.write_text(content)
        with pytest.raises(ValueError, match=said):
            calibration.read(other)
