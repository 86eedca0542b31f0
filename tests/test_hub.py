"""Models and calibrations of the hub, without a network: revisions, caches, the files that are asked for, refusals."""

import dataclasses
import json

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants, errors
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import calibration, cli
from clusterkv_jax.checkpoints.loading import CheckpointError, load, load_config
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.text import chat
from tests.support.checkpoint_files import INDEX, LLAMA, SINGLE, random_tensors, same, write
from tests.support.fake_hub import COMMIT, cached, fake_hub, refusal
from tests.test_chat import tokenizer


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return fake_hub(monkeypatch, tmp_path / "cache")


def folder_of(path, scale=1.0, shards=0):
    return write(path, LLAMA, {name: scale * x for name, x in random_tensors(LLAMA).items()}, shards)


# --- models ---


def test_a_branch_tag_or_commit(tmp_path, hub):
    first, second = folder_of(tmp_path / "1"), folder_of(tmp_path / "2", 2.0)
    hub.repos["owner/name"] = {"main": first, "v2": second, COMMIT: second, "refs/pr/1": second}
    newest = load("owner/name")
    assert same(newest.params, load(first).params)
    for revision in ("v2", COMMIT, "refs/pr/1"):
        assert same(load("owner/name", revision=revision).params, load(second).params)
    assert same(load("owner/name@v2").params, load(second).params)
    assert load("owner/name@v2").name == "owner/name@v2"


def test_only_what_is_needed_is_downloaded(tmp_path, hub):
    source = folder_of(tmp_path / "m", shards=2)
    for name in ("consolidated.safetensors", SINGLE.replace(".", ".fp16."), "pytorch_model.bin", "README.md"):
        (source / name).write_bytes(b"")
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    hub.repos["owner/name"] = {"main": source}
    assert same(load("owner/name").params, load(source).params)
    assert hub.calls == [
        ["config.json", INDEX],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ]
    load("owner/name")
    assert len(hub.calls) == 3  # the weights are there, and only whether they are the newest is asked


def test_a_single_file(tmp_path, hub):
    hub.repos["owner/name"] = {"main": folder_of(tmp_path / "m")}
    load("owner/name")
    assert hub.calls == [["config.json"], [SINGLE]]


def test_a_plan_needs_the_configuration_alone(tmp_path, hub):
    hub.repos["owner/name"] = {"main": folder_of(tmp_path / "m"), "v2": folder_of(tmp_path / "2")}
    assert model_config("owner/name@v2") == load_config(tmp_path / "m")
    assert hub.calls == [["config.json"]]
    with pytest.raises(CheckpointError, match=r"did not deliver its config\.json: there is no owner/other, or it is"):
        model_config("owner/other")


@pytest.mark.parametrize("shards", [0, 2])
def test_the_cache_serves_without_a_network(tmp_path, monkeypatch, shards):
    """HF_HUB_OFFLINE is set for all tests; the cache is one that huggingface_hub itself reads."""
    source = folder_of(tmp_path / "m", shards=shards)
    cached(tmp_path / "cache", "owner/name", source, ("main", "v2"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for revision in (None, "v2", COMMIT):
        assert same(load("owner/name", revision=revision).params, load(source).params)
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set, and not all of it is in the cache .*cache\."):
        load("owner/name@v3")


REFUSALS = {
    "gated": (
        refusal(errors.GatedRepoError, 403),
        r"it is gated; accept its licence at .*/owner/name, then log in with 'hf auth login', or set HF_TOKEN",
    ),
    "missing or private": (
        refusal(errors.RepositoryNotFoundError, 401),
        "there is no owner/name, or it is private; if it is, log in with 'hf auth login', or set HF_TOKEN",
    ),
    "revision": (refusal(errors.RevisionNotFoundError, 404), "owner/name has no branch, tag or commit 'v9'"),
    "no network": (errors.LocalEntryNotFoundError("An error\nhappened"), "no network reaches it, and not all of it is"),
    "another status": (refusal(errors.HfHubHTTPError, 503, "503 Unavailable\nfor url"), "503 Unavailable"),
    "a lost connection": (TimeoutError("read timed out"), "read timed out"),
    "no words": (RuntimeError(), "RuntimeError"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_the_hub_refuses_is_one_sentence(monkeypatch, kind):
    error, reason = REFUSALS[kind]

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    start = "There is no local folder 'owner/name', and the hub did not deliver a model of that id: "
    with pytest.raises(CheckpointError, match=f"^{start}{reason}[^\n]*\\.$") as found:
        load("owner/name", revision="v9")
    assert "\n" not in str(found.value)


def test_a_server_that_fails_is_named_where_the_cache_is_empty(monkeypatch):
    def refuse(*_, **__):
        raise errors.LocalEntryNotFoundError("An error") from refusal(errors.HfHubHTTPError, 500, "500 Server Error")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=r"did not deliver a model of that id: 500 Server Error\.$"):
        load("owner/name")


def test_revisions_of_what_has_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"^'demo' is not of the hub, and has no revision 'v2'\.$"):
        load("demo", revision="v2")
    with pytest.raises(CheckpointError, match="is not of the hub, and has no revision"):
        load(folder_of(tmp_path / "m"), revision="main")
    with pytest.raises(CheckpointError, match=r"^One revision is needed, got 'owner/name@v1' and revision='v2'\.$"):
        load("owner/name@v1", revision="v2")


@pytest.mark.wrong_arguments
def test_what_is_no_revision():
    with pytest.raises(CheckpointError, match=r"^revision must be the name of a branch, .* or None, got 5\.$"):
        load("owner/name", revision=5)


# --- generation_config.json ---


def _generating(folder, **stated):
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return folder


def test_how_the_authors_draw_is_taken_when_asked(tmp_path):
    folder = folder_of(tmp_path / "m")
    assert load(folder).sampling == ckv.Sampling()
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "pad_token_id": 5}
    model = load(_generating(folder, **stated, top_k=0, repetition_penalty=1.05))
    assert model.sampling == ckv.Sampling(temperature=0.6, top_p=0.9)
    assert (model.config.eos_ids, model.config.pad_id) == ((2, 3), 5)
    assert load(_generating(folder, do_sample=True, top_k=20)).sampling == ckv.Sampling(temperature=1.0, top_k=20)
    for greedy in ({"temperature": 0.6}, {"do_sample": False, "top_p": 0.9}, {"do_sample": True, "temperature": 0.0}):
        assert load(_generating(folder, **greedy)).sampling == ckv.Sampling()
    tokens = [[1, 2, 3]]
    model = load(_generating(folder, **stated))
    asked = [ckv.generate(model, tokens, max_new_tokens=8, sampling=s).tokens for s in (None, model.sampling)]
    assert (
        asked[0]
        == ckv.generate(load(write(tmp_path / "n", LLAMA, random_tensors(LLAMA))), tokens, max_new_tokens=8).tokens
    )
    assert asked[0] != asked[1]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"top_p": 1.5}, r"generation_config\.json: Sampling top_p must be above 0 and at most 1, got 1\.5\.$"),
        ({"temperature": "hot"}, r"generation_config\.json, field 'temperature': Expected float \| null, got str"),
    ],
)
def test_drawing_that_is_impossible(tmp_path, stated, message):
    folder = _generating(folder_of(tmp_path / "m"), do_sample=True, **stated)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


# --- calibrations ---


def _calibration(surrogate=True):
    layer = {"weights": np.ones((32, 4), np.float32), "bias": np.zeros(4, np.float32)}
    table = ((0.5,) * 4,) * 2
    measured = calibration.Calibration("m", table, ((0, 1),), ((1.0,) * 4,) * 2, {"tokens": 64})
    return measured if not surrogate else dataclasses.replace(measured, surrogate=(layer, layer))


def test_a_calibration_is_pushed_and_loaded(tmp_path, hub, monkeypatch):
    store = tmp_path / "repo"
    store.mkdir()
    calls = []

    class Api:
        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options))

        def create_branch(self, repo_id, **options):
            calls.append((repo_id, options))

        def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, revision):
            (store / path_in_repo).write_bytes(path_or_fileobj.read_bytes())
            return f"https://hub/{repo_id}/commit/{revision}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert ckv.push_calibration(_calibration(), "owner/name", private=True) == "https://hub/owner/name/commit/None"
    assert calls == [("owner/name", {"private": True, "exist_ok": True})]
    assert [file.name for file in store.iterdir()] == ["calibration.safetensors"]
    hub.repos["owner/name"] = {"main": store}
    model = load(folder_of(tmp_path / "m"), calibration="owner/name")
    assert model.calibration == _calibration()
    assert jnp.array_equal(model.params["layers"][1]["surrogate"]["weights"], jnp.ones((32, 4)))

    assert calibration.read(store) == calibration.read(store / "calibration.safetensors") == _calibration()
    ckv.push_calibration(store, "owner/name@v2")  # from a folder, to a branch
    assert calls[-1] == ("owner/name", {"branch": "v2", "exist_ok": True})
    (store / "calibration.safetensors").unlink()
    ckv.push_calibration(_calibration(surrogate=False), "owner/name")
    assert calibration.read("owner/name") == _calibration(surrogate=False)
    # Beside the weights of its model it is loaded with them.
    hub.repos["owner/other"] = {"main": folder_of(tmp_path / "other")}
    calibration.write(tmp_path / "other" / "calibration.safetensors", _calibration())
    assert load("owner/other").calibration == _calibration()


def test_calibrations_that_are_not_there(tmp_path, hub, monkeypatch):
    hub.repos["owner/name"] = {"main": folder_of(tmp_path / "m")}
    with pytest.raises(ValueError, match=r"^owner/name holds no calibration, neither calibration\.safetensors nor"):
        calibration.read("owner/name")
    with pytest.raises(ValueError, match=r"^There is no file owner/no, and the hub did not .*: there is no owner/no, "):
        calibration.read("owner/no")
    with pytest.raises(ValueError, match="holds no calibration, neither"):
        calibration.read(tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        calibration.read("owner/no.yaml")
    with pytest.raises(ValueError, match=r"^repo_id must be a hub id 'owner/name', got 'nobody'\.$"):
        ckv.push_calibration(_calibration(), "nobody")

    class Api:
        def create_repo(self, repo_id, **_):
            raise refusal(errors.HfHubHTTPError, 401, "401 Client Error")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(
        ValueError, match=r"^The hub did not take calibration\.safetensors for owner/name: it takes no "
    ):
        ckv.push_calibration(_calibration(), "owner/name")


@pytest.mark.parametrize(
    ("place", "message"),
    [("nobody", "--push must be a hub id such as owner/name, got 'nobody'."), ("me/x", "--push me/x needs the hub's")],
)
def test_what_cannot_be_pushed_is_noticed_at_once(monkeypatch, tmp_path, place, message):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    (tmp_path / "text.txt").write_text("A text.")
    arguments = ["--data", tmp_path / "text.txt", "--output", tmp_path / "c.yaml", "--no-plot", "--push", place]
    result = CliRunner().invoke(cli.app, ["calibrate", "demo", *map(str, arguments)])
    assert result.exit_code == 2
    assert message in result.stderr


# --- chat templates ---


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_stays_in_the_sandbox(template):
    with pytest.raises(ValueError, match=r"^The model's chat template fails: [^\n]*\.$"):
        chat.turn(tokenizer(template), "A text.")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{{ f(n) if n < 0 else '' }}{% for i in range(99999) %}{{ f(1) }}{% endfor %}{% endmacro %}"
        "{{ f(1) }}",
    ],
)
def test_a_template_without_end_is_ended(template):
    with pytest.raises(ValueError, match=r"^The model's chat template fails: [^\n]*(too long|maximum rec)"):
        chat.turn(tokenizer(template), "A text.")
