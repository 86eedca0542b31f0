"""Measured block sizes: the first entry that fits, nothing where none does, and errors in the files are named."""

import json
import logging

import pytest

from clusterkv_jax.kernels import tuning
from clusterkv_jax.runtime.dispatch import device_kind


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    tuning._blocks.cache_clear()
    yield tmp_path / "some_op"
    tuning._blocks.cache_clear()


def write(folder, entries):
    folder.mkdir()
    (folder / f"{device_kind()}.json").write_text(json.dumps(entries))


def test_the_first_entry_that_fits_is_taken(folder):
    write(
        folder,
        [
            {"where": {"dim": 128, "slots": [0, 1024]}, "blocks": {"block": 64}},
            {"where": {"dim": 128}, "blocks": {"block": 256, "warps": 4}},
        ],
    )
    assert tuning.blocks("some_op", dim=128, slots=1024) == {"block": 64}
    assert tuning.blocks("some_op", dim=128, slots=1025) == {"block": 256, "warps": 4}
    assert tuning.blocks("some_op", dim=64, slots=5) == {}


def test_a_device_without_a_file_takes_that_of_one_alike(folder, monkeypatch):
    folder.mkdir()
    for device, block in (("nvidia_h200", 64), ("nvidia_gh200_480gb", 32)):
        (folder / f"{device}.json").write_text(json.dumps([{"where": {}, "blocks": {"block": block}}]))
    for device, block in (("NVIDIA H200", 64), ("NVIDIA H100 80GB HBM3", 64), ("NVIDIA GH200 480GB", 32)):
        monkeypatch.setattr(tuning, "device_kind", lambda device=device: device)
        assert tuning.blocks("some_op") == {"block": block}
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA A100-SXM4-80GB")
    assert tuning.blocks("some_op") == {}


def test_a_miss_is_logged_once(folder, caplog):
    with caplog.at_level(logging.INFO, logger=tuning.log.name):
        assert tuning.blocks("some_op", dim=128) == tuning.blocks("some_op", dim=128) == {}
    assert [record.message for record in caplog.records] == [
        f"some_op has no measured block sizes on {device_kind()} for {{'dim': 128}}"
    ]


def test_an_entry_of_unknown_properties_is_an_error(folder):
    write(folder, [{"where": {"dims": 128}, "blocks": {}}])
    with pytest.raises(ValueError, match="names dims; allowed: dim"):
        tuning.blocks("some_op", dim=128)
