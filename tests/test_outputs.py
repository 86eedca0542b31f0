"""A run whose output is a bucket: what is written is there, and goes on from there on a machine that has nothing."""

import threading
from contextlib import nullcontext

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from clusterkv_jax.calibration import read
from clusterkv_jax.cli.terminal import use_compilation_cache
from clusterkv_jax.evaluation import outputs, runner
from clusterkv_jax.evaluation.batching import plan
from clusterkv_jax.evaluation.settings import settings
from clusterkv_jax.presets import find_preset
from clusterkv_jax.storage import buckets

pytest.importorskip("etils.epath")
from etils.epath import testing

from tests.support import runs
from tests.support.buckets import bucket
from tests.test_evaluation_runner import CONFIG, ENTRIES, ROOT, go, jobs, respond

CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
GS = "gs://my-bucket/runs/one"


class Killed(BaseException):
    """Ends a run as `kill -9` would."""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """The folder of the run in the bucket; `fresh` gives every session another machine."""
    monkeypatch.setattr(buckets.platformdirs, "user_cache_path", lambda *_, **__: next(machines))
    machines = (tmp_path / f"machine-{i}" for i in range(99))
    with bucket(tmp_path / "cloud", "my-bucket"):
        yield tmp_path / "cloud" / "runs" / "one"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    go(folder)
    return (folder / runner.RESULTS).read_bytes()


def session(batches_until_killed=None, config=CONFIG):
    """A session on a fresh machine, with answers in another order than that of the run."""
    output, count = outputs.at(GS), 0

    def answers(missing):
        nonlocal count
        for batch in reversed(missing):
            if count == batches_until_killed:
                raise Killed
            count += 1
            yield from runs.in_turn(respond)([batch])

    batches = plan(jobs(), ENTRIES, 4)
    asked = settings(config, jobs(), ENTRIES)
    with output.opened():
        runner.record(output.folder, asked, {}, batches, answers, writing=output.sending(nullcontext()))
        output.complete()
    return count


def test_what_is_written_outlives_the_machine(cloud, unbroken):
    most, answered, parts = len(plan(jobs(), ENTRIES, 4)), 0, cloud / "results.jsonl.parts"
    for kills in (3, 1, 4):
        with pytest.raises(Killed):
            session(kills)
        answered += kills
        assert len(list(parts.iterdir())) == kills
    assert session() == most - answered
    assert (cloud / runner.RESULTS).read_bytes() == unbroken
    assert list(parts.iterdir()) == []
    assert session() == 0


def test_parts_that_are_in_the_whole_already_count_once(cloud, unbroken, monkeypatch):
    def killed(*_):
        raise Killed

    with pytest.raises(Killed):
        session(3)
    with monkeypatch.context() as patch:
        patch.setattr(outputs.Output, "_remove_parts", killed)
        with pytest.raises(Killed):
            session()
    assert list((cloud / "results.jsonl.parts").iterdir())
    session()
    assert (cloud / runner.RESULTS).read_bytes() == unbroken


def test_a_bucket_that_is_not_as_a_run_left_it(cloud):
    with pytest.raises(Killed):
        session(3)
    with pytest.raises(ValueError, match=r"^gs://my-bucket/runs/one holds a run with suite = 'ruler', not 'other'; "):
        session(config={**CONFIG, "suite": "other"})
    with pytest.raises(Killed):
        session(2)
    parts = sorted((cloud / "results.jsonl.parts").iterdir())
    parts[0].unlink()
    with pytest.raises(ValueError, match=f"{parts[1].name} begins behind the .* a part is missing.$"):
        session()


def test_two_runs_at_once(cloud):
    one, other = outputs.at(GS), outputs.at(GS)
    with one.opened(), other.opened():
        for output, ends in ((one, nullcontext()), (other, pytest.raises(ValueError, match="Another run is writing"))):
            (output.folder / runner.RESULTS).write_text("{}\n")
            with ends, output.sending(nullcontext()):
                pass


def test_a_bucket_that_does_not_answer(cloud):
    def refused(original, path):
        raise RuntimeError("Forbidden: 403.")

    with (
        testing.mock_epath(exists=refused),
        pytest.raises(OSError, match=rf"^{GS}/results.jsonl cannot be reached: Forbidden: 403\.$"),
        outputs.at(GS).opened(),
    ):
        pass


def test_a_bucket_that_says_nothing(cloud, monkeypatch):
    monkeypatch.setattr(buckets, "PATIENCE_S", 0.05)
    silent = threading.Event()
    with (
        testing.mock_epath(exists=lambda *_: silent.wait(10)),
        pytest.raises(OSError, match=r"^gs://silent does not answer within 0\.05 s; check its name and the network\.$"),
    ):
        outputs.at("gs://silent/runs")
    silent.set()


def test_a_bucket_that_answers_no_more(cloud, monkeypatch):
    """A restart may mend that; what is wrong from the beginning it does not."""
    output = outputs.at(GS)

    def writes(name):
        with output.sending(nullcontext()):
            (output.folder / name).write_text(name)

    def refused(*_):
        raise OSError("gs://my-bucket cannot be reached: 503.")

    with output.opened(), monkeypatch.context() as patch:
        patch.setattr(outputs, "copied", refused)
        with pytest.raises(OSError, match="503") as error:
            writes(runner.RUN)
        assert not isinstance(error.value, outputs.Lost)
        patch.undo()
        writes(runner.RUN)
        patch.setattr(outputs, "there", refused)
        with pytest.raises(outputs.Lost, match="503"):
            writes(runner.RESULTS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://bucket/results", "A folder or a gs:// address is needed, got s3://bucket/results."),
        ("gs://", "A bucket and a folder follow gs://, got gs://."),
    ],
)
def test_other_addresses(name, message):
    with pytest.raises(ValueError, match=message):
        outputs.at(name)


def test_compiled_programs(cloud):
    settings = {name: getattr(jax.config, name) for name in CACHE}
    try:
        compilation_cache.reset_cache()
        use_compilation_cache(True, "gs://my-bucket/programs")
        double = jax.jit(lambda x: 2 * x + 21)
        assert double(1.0) == 23
    finally:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert any(file.name.endswith("-cache") for file in (cloud.parents[1] / "programs").iterdir())


def test_presets_and_calibrations(cloud):
    configs = cloud.parents[1] / "configs"
    configs.mkdir(parents=True)
    here = read(ROOT / "models" / "demo" / "calibration.safetensors")
    (configs / "calibration.safetensors").write_bytes((ROOT / "models/demo/calibration.safetensors").read_bytes())
    preset = "method: CentroidKV\ndescription: Ours.\nsource: None.\ncalibration: calibration.safetensors\n"
    (configs / "ours.yaml").write_text(preset)
    assert find_preset("gs://my-bucket/configs/ours.yaml").calibration.head_shares == here.head_shares
    for name in ("gs://my-bucket/configs", "gs://my-bucket/configs/calibration.safetensors"):
        assert read(name).settings == here.settings
    with pytest.raises(ValueError, match=r"^There is no calibration at gs://my-bucket/nowhere.$"):
        read("gs://my-bucket/nowhere")
