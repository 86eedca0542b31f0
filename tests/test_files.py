"""Files are whole or not there: after a kill at any moment, and where a disk has no room."""

import contextlib
import errno
import random
import resource
import signal
from pathlib import Path

import pytest

import clusterkv_jax as ckv
from clusterkv_jax.storage.files import append_whole, replacing, write_whole
from tests.support.tiny import prefill, prompt, tiny


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@contextlib.contextmanager
def room_for(size):
    """No file grows beyond this byte, whoever writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / ".a.part"
    (left / "of a library").mkdir(parents=True)
    for name in ("lock", "new", ".tmp123"):
        (left / name).write_text("half")
    write_whole(tmp_path / "a", "whole")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "whole"


def test_two_do_not_write_one_file_at_once(tmp_path):
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("first")
        with pytest.raises(ValueError, match=r"^Another process is writing .*/a; wait for it"):
            write_whole(tmp_path / "a", "second")
        write_whole(tmp_path / "b", "another file")
    assert names(tmp_path) == ["a", "b"]
    assert (tmp_path / "a").read_text() == "first"


def test_a_folder_appears_at_once(tmp_path):
    with replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
        write_whole(temporary / "a", "text")
        assert not (tmp_path / "folder").exists()
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["a"]
    with (
        pytest.raises(OSError, match=r"^.*/folder could not be written: Directory not empty\.$"),
        replacing(tmp_path / "folder") as temporary,
    ):
        temporary.mkdir()
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "Input/output error")],
)
@pytest.mark.parametrize("kind", ["of Python", "of Rust"])
def test_a_full_disk_is_named_with_its_file(tmp_path, monkeypatch, number, reason, kind):
    def half(text, **_):
        Path(temporary).write_bytes(b"half of")
        raise OSError(number, "words") if kind == "of Python" else RuntimeError(f"I/O error: words (os error {number})")

    write_whole(tmp_path / "a", "old")
    with (
        pytest.raises(OSError, match=rf"^{tmp_path}/a could not be written: {reason}\.$") as error,
        replacing(tmp_path / "a") as temporary,
    ):
        half("")
    assert error.value.errno == number
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("size", [0, 1, 4096, 5000])
def test_lines_without_room_leave_the_file_as_it_was(tmp_path, size):
    file, line = tmp_path / "lines", "x" * 4999 + "\n"
    with room_for(size), pytest.raises(OSError, match=r"lines could not be written: File too large\.$"):
        append_whole(file, line + line)
    assert file.read_bytes() == b""
    append_whole(file, line)
    with room_for(5000 + size // 2), pytest.raises(OSError, match="could not be written"):
        append_whole(file, line)
    assert file.read_text() == line
    append_whole(file, line)
    assert file.read_text() == 2 * line


@pytest.fixture(scope="module")
def cache():
    return prefill(ckv.Full(), prompt(1, 24))[0]


def test_a_cache_without_room_leaves_the_one_before_it(tmp_path, cache):
    file, chance = tmp_path / "book", random.Random(0)
    ckv.save_cache(file, cache, tiny().config, ckv.Full())
    whole = file.read_bytes()
    for _ in range(4):
        with (
            room_for(chance.randrange(len(whole))),
            pytest.raises(OSError, match=rf"^{file} could not be written: File too large\.$"),
        ):
            ckv.save_cache(file, cache, tiny().config, ckv.Full())
        assert names(tmp_path) == ["book"]
        assert file.read_bytes() == whole


def test_one_cache_is_one_file_byte_for_byte(tmp_path, cache):
    for name in "abcdef":
        ckv.save_cache(tmp_path / name, cache, tiny().config, ckv.Full())
    assert len({(tmp_path / name).read_bytes() for name in "abcdef"}) == 1
