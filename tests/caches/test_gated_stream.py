"""Texts that come bit by bit: read as one that is whole, kept at any moment, without an end."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.cache.layers import occupancy
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_stream import kept, open_stream, read_on
from clusterkv_jax.text.pieces import next_tokens, text_pieces
from tests.caches.test_gated_reading import GATE, HALF, SMALL, alike, gated, kinds, short_of_positions
from tests.support.tiny import prompt, taught
from tests.test_read import TEXT, model  # noqa: F401

FEW = ckv.Budget(tokens=16)


def read(stream, ids):
    """The stream with these tokens, in parts as it wants them."""
    while ids:
        count = stream.wanted
        stream, ids = read_on(stream, ids[:count]), ids[count:]
    return stream


def test_a_text_that_comes_is_read_as_one_that_is_whole():
    method, ids = kinds(FEW)[0], prompt(1, 45)
    stream = read(open_stream(taught(), method, GATE, reserve=24), ids[:40])
    for count in (40, 45):
        whole, _ = gated(method, [ids[:count]], step_tokens=32)
        alike(kept(stream), whole)
        stream = read(stream, ids[40:]) if count == 40 else stream
    assert stream.tokens == 45


def test_a_text_within_the_window_is_compressed_as_afterwards():
    stream = read(open_stream(taught(), kinds(ckv.Budget(tokens=10))[0], GATE, reserve=24), prompt(1, 14))
    assert occupancy(kept(stream)) == [[[10, 10]], [[10, 10]]]


def test_rows_stay_as_many_however_long_the_text_becomes():
    method = kinds(FEW)[1]
    stream, tiny = open_stream(short_of_positions(), method, Gate(16, 8, renumber=True), reserve=24), taught()
    stream = read(stream, prompt(1, 400))
    cache = kept(stream)
    assert np.asarray(occupancy(cache)).tolist() == [[[16, 16]], [[16, 16]]]
    assert int(cache.position[0]) < 100
    assert np.isfinite(ckv.decode_step(tiny.params, tiny.config, method, cache, np.asarray([3]))[1]).all()


@pytest.mark.parametrize(
    ("method", "gate", "message"),
    [
        (kinds(HALF)[0], GATE, "A text without an end needs a fixed number of rows"),
        (ckv.SnapKV(FEW), GATE, "SnapKV needs later queries"),
        (ckv.KVzap(ckv.Budget(tokens=90), **SMALL), Gate(16, 8, renumber=True), "so that no renumbering helps"),
        (kinds(FEW)[0], GATE, "After 72 tokens the text exceeds the model's 100 positions; renumber=True"),
    ],
)
def test_what_cannot_be_read_without_an_end_says_so(method, gate, message):
    with pytest.raises(ValueError, match=message):
        read(open_stream(short_of_positions(), method, gate, reserve=24), prompt(1, 100))


# --- bytes to tokens ---


@pytest.mark.parametrize("size", [1, 100])
def test_tokens_of_pieces_are_those_of_the_text(size):
    tokenizer, text = ckv.load("demo").tokenizer, f"Über {TEXT} 1,000 ünits,\n\n  and 'more' — {'x' * 50}\n"
    raw = text.encode()
    pieces = list(text_pieces(raw[i : i + size] for i in range(0, len(raw), size)))
    assert "".join(pieces) == text
    assert len(pieces) > 3
    found = tokenizer.encode(pieces[0], add_special_tokens=False)
    for piece in pieces[1:]:
        found += next_tokens(tokenizer, piece)
    assert found == tokenizer.encode(text, add_special_tokens=False)


def test_a_text_without_words_does_not_wait_for_them():
    assert [len(piece) for piece in text_pieces([b"x" * 5000, b"y" * 10])] == [5000, 10]
    with pytest.raises(ValueError, match="is not UTF-8: it holds the byte 0xff"):
        list(text_pieces([b"good ", b"\xff"]))


# --- the command ---

PIPED = ["generate", "--prompt-file", "-", "--reading", "gated", "--window", 64, "--chunk", 32, "--renumber"]
PIPED += ["--method", "centroidkv", "--cache-tokens", 96]
ASKED = ["--question", "Who?", "--max-new-tokens", 4, "--json"]


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **options)


def test_a_pipe_answers_as_a_file_that_is_read_gated(model, tmp_path):  # noqa: F811
    (tmp_path / "text.txt").write_text(TEXT)
    asked = [*ASKED, "--model", model]
    piped = run(*PIPED, *asked, "--save", tmp_path / "text.ckv", input=TEXT)
    assert piped.exit_code == 0, piped.output
    file = run(*PIPED[:2], tmp_path / "text.txt", *PIPED[3:], *asked)
    later = run("generate", "--cache", tmp_path / "text.ckv", *ASKED)
    found, expected, again = (json.loads(x.stdout)["runs"][0]["texts"] for x in (piped, file, later))
    assert found == expected == again


def test_a_killed_process_leaves_what_it_saved(model, tmp_path):  # noqa: F811
    saved = tmp_path / "log.ckv"
    code = "import sys; from clusterkv_jax.cli import app; app(sys.argv[1:])"
    command = [*PIPED, "--model", model, "--save", saved, "--save-every", 0]
    process = [sys.executable, "-c", code, *map(str, command)]
    with subprocess.Popen(process, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            child.stdin.write(20 * TEXT.encode())
            child.stdin.flush()  # and it stays open: more may come
            while not saved.exists():
                assert child.poll() is None, child.stderr.read().decode()
                time.sleep(0.1)
        finally:
            child.kill()
    later = run("generate", "--cache", saved, *ASKED)
    assert later.exit_code == 0, later.output
    (stats,) = json.loads(later.stdout)["runs"][0]["stats"]
    assert 64 <= stats["prompt_tokens"][0] <= 512
    assert stats["new_tokens"] == [4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--cache-ratio", 0.5, "--save", "x.ckv"], "--save is for a text that is read as it comes"),
        (["--cache-tokens", 96, "--save", "no/such/x.ckv"], "The folder no/such does not exist"),
        (["--cache-tokens", 96, "--question", "Who?", "--max-new-tokens", 500], "exceed the model's 512 positions"),
    ],
)
def test_pipes_that_cannot_be_get_one_sentence(model, change, said):  # noqa: F811
    result = run(*PIPED[:-2], *change, "--model", model, input=TEXT)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
