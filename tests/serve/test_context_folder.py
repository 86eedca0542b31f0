"""A folder of contexts: what a killed server has read another one finds there, and servers share it."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints.loading import save_huggingface
from clusterkv_jax.serve import Settings, make_server
from clusterkv_jax.serve.context_files import keys, open_files, path_of, prune
from clusterkv_jax.serve.text_keys import key_of, longest_beginning
from tests.support.byte_model import byte_model, byte_tokenizer
from tests.support.server import TEMPLATE, running, wait_for

SYSTEM = "You answer in a word or two, and never ask anything back. "
TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
NEW = 8


def asked(address, messages):
    """An answer, and how many tokens of its prompt were there."""
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": NEW}
    done = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    return done["choices"][0]["message"]["content"], done["usage"]["prompt_tokens_details"]["cached_tokens"]


def written(folder, count):
    """Wait until so many caches are whole in a folder."""
    wait_for(lambda: len(list(folder.rglob("*.safetensors"))) >= count)


def server_of(folder, **settings):
    how = {"slots": 2, "max_tokens": 448, "reserve": 96, "method": "full"}
    return make_server(byte_model(TEMPLATE), Settings("bytes", context_folder=folder, **settings), **how)


def test_what_a_killed_server_has_read_outlives_it(tmp_path):
    (tmp_path / "tokens.json").write_text(byte_tokenizer().to_str())
    model, folder = byte_model(), tmp_path / "contexts"
    save_huggingface(
        tmp_path / "bytes", model.params, model.config, tokenizer_json=tmp_path / "tokens.json", dtype="float32"
    )
    folder.mkdir()
    room = {"port": 0, "slots": 1, "max-tokens": 448, "reserve": 96, "method": "full", "context-folder": folder}
    command = [sys.executable, "-m", "clusterkv_jax", "serve", str(tmp_path / "bytes")]
    command += [f"--{name}={value}" for name, value in room.items()]

    def killed(work):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                return work(next(line for line in process.stderr or () if "http://" in line).rsplit(maxsplit=1)[1])
            finally:
                process.send_signal(signal.SIGKILL)

    def first(address):
        answer = asked(address, TURNS)
        said = httpx.post(f"{address}/v1/responses", json={"input": SYSTEM, "temperature": 0, "max_output_tokens": NEW})
        number = said.json()["id"]
        item = httpx.post(f"{address}/v1/responses/compact", json={"previous_response_id": number}).json()["output"][0]
        written(folder, 3)  # the beginning, the answer, and the response's
        wait_for(lambda: len(list(folder.rglob("*.json"))) >= 2)
        return answer, item

    (answer, none), item = killed(first)
    leftover = next(folder.glob("*")) / ".1-0.safetensors.part"
    leftover.mkdir()
    (leftover / "new").write_bytes(b"half a cache")

    def second(address):
        later = [*TURNS, {"role": "assistant", "content": answer}, {"role": "user", "content": "And when?"}]
        body = {"input": [item, {"role": "user", "content": "Why?"}], "temperature": 0, "max_output_tokens": NEW}
        response = httpx.post(f"{address}/v1/responses", json=body, timeout=60).json()
        return asked(address, TURNS), asked(address, later), response["usage"]["input_tokens_details"]["cached_tokens"]

    (again, cached), (_, cached_later), of_item = killed(second)
    assert (none, again) == (0, answer)
    assert cached == len(SYSTEM)
    assert cached_later > cached + NEW
    assert of_item == len(SYSTEM) + NEW - 1
    assert not leftover.exists()


def test_servers_share_a_folder_and_answer_alike(tmp_path):
    one, other, limited = server_of(tmp_path), server_of(tmp_path), server_of(tmp_path, context_folder_bytes=0)
    with running(one) as first, running(other) as second, running(limited) as third:
        answer, cached = asked(first, TURNS)
        written(tmp_path, 2)
        assert (cached, asked(second, TURNS)) == (0, (answer, len(f"<system>{SYSTEM}")))
        for file in tmp_path.rglob("*.safetensors"):
            file.write_bytes(b"no cache")
        assert asked(third, TURNS) == (answer, 0)
    assert one.files.folder == other.files.folder
    assert not any(file.read_bytes() == b"no cache" for file in tmp_path.rglob("*.safetensors"))


def test_what_memory_has_no_more_is_loaded_from_its_file(tmp_path):
    server, key = server_of(tmp_path), key_of(f"<system>{SYSTEM}")
    with running(server) as address:
        answer, _ = asked(address, TURNS)
        written(tmp_path, 2)
        server.served.call(lambda engine: engine.drop(server.contexts[key].context.result())).result()
        assert asked(address, TURNS) == (answer, len(f"<system>{SYSTEM}"))
        context = server.contexts[key].context.result()
    assert context.file == path_of(server.files, key)


def test_files_that_are_old_or_too_many_go(tmp_path):
    files = open_files(tmp_path, "a model", 250, 3600)
    now, texts = time.time(), ["old", "first", "second", "third"]
    for text, age in zip(texts, (7200, 30, 20, 10), strict=True):
        path_of(files, key_of(text)).write_bytes(b"x" * 100)
        os.utime(path_of(files, key_of(text)), (now - age, now - age))
    prune(files)
    assert keys(files) == {key_of("second"), key_of("third")}
    assert open_files(tmp_path, "another model", 250, 3600).folder != files.folder
    with pytest.raises(ValueError, match="context_folder must be a folder that exists"):
        open_files(tmp_path / "none", "a model", 250, 3600)


@given(texts=st.lists(st.text("ab", max_size=6)), text=st.text("ab", max_size=8))
def test_the_longest_beginning_is_found(texts, text):
    found = longest_beginning(text, {key_of(each) for each in texts}, len(text) - 1)
    expected = max((each for each in texts if text.startswith(each) and each != text), key=len, default=None)
    assert found == (None if expected is None else key_of(expected))


def test_a_server_of_several_processes_has_no_folder(tmp_path):
    with pytest.raises(ValueError, match="A context folder needs a server of one process"):
        make_server(byte_model(), Settings("bytes", context_folder=tmp_path), tell=print, method=ckv.Full())
