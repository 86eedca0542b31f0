"""Contexts on a disk that is full, or from which files vanish: they are read again, and nobody notices."""

import errno

import pytest

from clusterkv_jax import saving
from tests.engine.test_engine import EIGHT, alone, engine
from tests.support.tiny import prompt


def on_disk(folder, contexts=3):
    """An engine that has room for one context on the device and for others in files, and contexts that it has read."""
    served = engine(context_bytes=engine().memory.contexts // 2, context_host_bytes=0, context_folder=folder)
    return served, [served.read(prompt(seed, 40), seed=seed) for seed in range(contexts)]


def asked(served, contexts):
    handles = [served.add(context, prompt(903, 3), **EIGHT) for context in contexts]
    served.run()
    return [tuple(handle.result().tokens[0]) for handle in handles]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"no cache")])
def test_a_file_that_is_gone_or_damaged_is_read_again(tmp_path, damage):
    served, contexts = on_disk(tmp_path)
    assert served.stats().contexts == {"device": 1, "host": 0, "disk": 2}
    for file in tmp_path.rglob("*.safetensors"):
        damage(file)
    assert asked(served, contexts) == [alone(seed, 40, 3) for seed in range(3)]


def test_a_full_disk_holds_nothing_and_stops_nobody(tmp_path, monkeypatch):
    def full(path, *_):
        raise OSError(errno.ENOSPC, f"{path} could not be written: the disk is full.")

    monkeypatch.setattr(saving, "save", full)
    served, contexts = on_disk(tmp_path)
    assert served.stats().contexts == {"device": 1, "host": 0, "disk": 0}
    assert asked(served, contexts) == [alone(seed, 40, 3) for seed in range(3)]


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_holds_is_not(tmp_path):
    dead = tmp_path / "contexts-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "context-0.safetensors").write_bytes(b"a cache")
    first, contexts = on_disk(tmp_path)
    second, _ = on_disk(tmp_path)
    assert not dead.exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert asked(first, contexts) == [alone(seed, 40, 3) for seed in range(3)]
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
