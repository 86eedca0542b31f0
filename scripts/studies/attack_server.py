"""Attacks `clusterkv serve` and looks at what is left: wrong bodies, large ones, guessed keys, slow and lost clients.

    python scripts/studies/attack_server.py
    python scripts/studies/attack_server.py --only bodies,disconnects --bodies 1000

Each chunk of an attack is a line of the output, and one that is there already is not run again. A line names what
should not be: an answer that is no JSON in its interface's form, an error that is no sentence, a status that was not to
be expected, a slot that stays in use, another answer than before. At the end the server's open files, threads and
memory are compared with those at the beginning, and it is told to end, and killed. Linux.
"""

import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from clusterkv_jax.checkpoints import loading
from clusterkv_jax.models import parameters, registry

DEMO = Path(__file__).parents[2] / "models" / "demo"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KEY = "a key that nobody guesses"
USER = {"role": "user", "content": "Who are you?"}
TOOL = {"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {"town": {}}}}
DRAWN = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "n": 1, "stop": ["x"], "logit_bias": {"1": 1.0}, "seed": 1}
# What is right, of each endpoint.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1, "logprobs": 1, "stream": False, **DRAWN},
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be brief."}, {**USER, "content": [{"type": "text", "text": "Hi"}]}],
        "max_completion_tokens": 1,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        **DRAWN,
    },
    "/v1/responses": {
        "input": [{"type": "message", **USER}, {"type": "function_call_output", "call_id": "1", "output": "rain"}],
        "instructions": "Be brief.",
        "max_output_tokens": 1,
        "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    },
    "/v1/responses/compact": {
        "input": [{"type": "message", **USER}, {"type": "message", "role": "assistant", "content": "I am"}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **TOOL}],
    },
    "/v1/messages": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}],
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"messages": [USER], "tools": [{"name": "weather", "input_schema": {}}]},
    "/tokenize": {"messages": [USER], "model": "demo"},
    "/detokenize": {"tokens": [1, 2]},
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 0.5, 2**31, -(2**63) - 1, 10**30, 1e308),
    *("", " ", "x", "NaN", "\x00", "\ud800", "{{ 1/0 }}", "<tool_call>", "x" * 99_999),
    *([], [[]], {}, {"": None}, {"type": "text"}, [0] * 9999),
]
TEXTS = ["NaN", "1e999", "01", "9" * 5000, "'", "[1,,2]", "\ufeff{}", "\\ud800"]
TEXTS += ["[" * 9999 + "]" * 9999, '{"a":' * 9999]
ALLOWED = {200, 400, 404, 408, 413, 422, 429}
SENTENCE = re.compile(r"[^\n]*[.?]")


@dataclass(frozen=True)
class Target:
    """A server: where it listens, and its process where that is not this one."""

    host: str
    port: int
    pid: int | None = None


@dataclass(frozen=True)
class Reply:
    """What a server says."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def ask(target: Target, path: str, body: Any, *, key: str = KEY, timeout: float = 120) -> Reply:
    """A request in a connection of its own; `body` is bytes, what becomes JSON, or None for a GET."""
    line = HTTPConnection(target.host, target.port, timeout=timeout)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        line.request("GET" if raw is None else "POST", path, raw, {"authorization": f"Bearer {key}"})
        response = line.getresponse()
        return Reply(response.status, response.read(), dict(response.headers))
    finally:
        line.close()


# --- attacks: each takes the server and random numbers, and names what should not be ---


def bodies(target: Target, draw: random.Random, path: str) -> tuple[str, list[str]]:
    """A body with one to three changes, or damaged bytes."""
    raw = mutated(BODIES[path], draw)
    reply = ask(target, path, raw)
    return str(reply.status), [f"{fault}: {raw[:300]!r}" for fault in faults(path, reply)]


def oversized(target: Target, draw: random.Random) -> tuple[str, list[str]]:
    """A body that is too large, announced or in chunks without an end, or announced and never sent."""
    path, kind = draw.choice(list(BODIES)), draw.choice(["announced", "chunked", "lie"])
    with socket.create_connection((target.host, target.port), timeout=30) as line:
        coding = "transfer-encoding: chunked" if kind == "chunked" else f"content-length: {2**30}"
        line.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{coding}\r\n\r\n".encode())
        said = b""
        with suppress(ConnectionError):  # the server need not read what it refuses
            for _ in range(0 if kind == "lie" else 40):
                line.sendall(b"80000\r\n" + b"x" * 2**19 + b"\r\n" if kind == "chunked" else b"x" * 2**19)
        with suppress(ConnectionError):
            said = line.recv(2**16)
    status = said.split(b" ", 2)[1].decode() if said.startswith(b"HTTP/1.1 ") else "closed"
    return status, [] if status in ("413", "closed") else [f"{kind} {path}: {said[:200]!r}"]


def keys(target: Target, draw: random.Random) -> tuple[str, list[str]]:
    """A key that is not the right one, at any path but /health."""
    letters = "".join(map(chr, range(33, 256)))
    guesses = [KEY[: draw.randrange(len(KEY))], KEY + draw.choice(letters), KEY.swapcase(), "", "\xff" * 9]
    guesses.append("".join(draw.choices(letters, k=draw.randrange(1, 999))))
    path = draw.choice([*BODIES, "/v1/models", "/metrics", "/status", "/version"])
    reply = ask(target, path, BODIES.get(path), key=draw.choice(guesses))
    wrong = [] if reply.status == 401 else [f"{path}: {reply.status} for a wrong key"]
    return str(reply.status), wrong + faults(path, reply, {401})


def disconnects(target: Target, draw: random.Random) -> tuple[str, list[str]]:
    """A client that leaves while it sends, waits or reads, politely or not."""
    limits = {path: name for path, body in BODIES.items() for name in body if name.startswith("max_")}
    path, limit = draw.choice(list(limits.items()))
    body = json.dumps(BODIES[path] | {limit: draw.randrange(1, 60), "stream": draw.random() < 0.7, "n": 1}).encode()
    raw = head(path, len(body)) + body
    raw = raw[: draw.randrange(len(raw))] if draw.random() < 0.2 else raw
    with (
        socket.create_connection((target.host, target.port), timeout=30) as line,
        suppress(ConnectionError, TimeoutError),
    ):
        line.sendall(raw)
        line.settimeout(draw.random() * 0.2)
        for _ in range(draw.randrange(4)):
            if not line.recv(draw.randrange(1, 2000)):
                break
        if draw.random() < 0.3:  # a reset in place of a goodbye
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "left", []


def slow(target: Target, draw: random.Random) -> tuple[str, list[str]]:
    """Clients that read nothing of a stream, or send their request a byte at a time; others are answered meanwhile."""
    body = json.dumps({"prompt": "Once", "max_tokens": 100, "stream": True, "ignore_eos": True}).encode()
    begin = head("/v1/completions", len(body))
    lines = [socket.create_connection((target.host, target.port), timeout=30) for _ in range(16)]
    try:
        for line in lines:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            line.sendall(begin + (body if draw.random() < 0.5 else body[: draw.randrange(len(body))]))
        reply = ask(target, "/v1/completions", {"prompt": "Once", "max_tokens": 4}, timeout=60)
    finally:
        for line in lines:
            line.close()
    return str(reply.status), faults("/v1/completions", reply)


# --- parts ---


def head(path: str, length: int) -> bytes:
    """What stands before a body of so many bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def faults(path: str, reply: Reply, allowed: set[int] = ALLOWED) -> list[str]:
    """What is wrong with an answer whatever was asked."""
    if reply.status not in allowed | {200}:
        return [f"{path}: {reply.status} {reply.body[:200]!r}"]
    if reply.status == 200 and "event-stream" in reply.headers.get("content-type", ""):
        return [f"{path}: an error in a stream, {reply.body[-300:]!r}"] if b"server_error" in reply.body else []
    try:
        value = json.loads(reply.body)
    except ValueError:
        return [f"{path}: no JSON, {reply.body[:200]!r}"]
    if reply.status == 200:
        return []
    message, of_claude = value.get("error", {}).get("message", ""), path.startswith("/v1/messages")
    found = [] if of_claude == (value.get("type") == "error") else [f"{path}: an error in another form, {value!r:.200}"]
    inside = "Traceback" in message or ".py" in message or "object at 0x" in message
    return found + ([f"{path}: {message[:300]!r}"] if inside or not SENTENCE.fullmatch(message) else [])


def mutated(body: Any, draw: random.Random) -> bytes:
    """A body as bytes, wrong in one to three places."""
    if draw.random() < 0.2:
        raw = bytearray(json.dumps(body).encode())
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        return bytes(raw[: draw.choice([None, draw.randrange(len(raw))])])
    tree, texts = json.loads(json.dumps(body)), dict[str, str]()
    for _ in range(draw.randrange(1, 4)):
        if not (found := list(places(tree))):
            break
        box, name = draw.choice(found)
        change = draw.choice(["value", "value", "text", "drop", "double", "rename", "wrap"])
        if change == "text":
            mark = f"@{len(texts)}@"
            texts[mark], box[name] = draw.choice(TEXTS), mark
        elif change == "drop":
            del box[name]
        elif change == "double" and isinstance(box[name], list):
            box[name] *= draw.choice([2, 40])
        elif change == "rename" and isinstance(box, dict):
            box[draw.choice(["", "x", "type", "stream", "__class__"])] = box.pop(name)
        else:
            box[name] = [box[name]] if change == "wrap" else deepcopy(draw.choice(ODD))
    raw = json.dumps(tree)
    for mark, text in texts.items():
        raw = raw.replace(f'"{mark}"', text)
    return raw.encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree below its root: a box, and the name or number in it."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for name, child in list(children):
        yield value, name
        yield from places(child)


def settled(target: Target, seconds: float = 60) -> list[str]:
    """Nothing where all slots are free again and nobody waits, sooner or later."""
    end = time.monotonic() + seconds
    while (status := json.loads(ask(target, "/status", None).body))["active"] or status["waiting"]:
        if time.monotonic() > end:
            return [f"{status['active']} slots stay in use, {status['waiting']} requests wait"]
        time.sleep(0.05)
    return []


def known(target: Target) -> str:
    """A greedy answer, which is always the same one."""
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    return json.loads(ask(target, "/v1/completions", body).body)["choices"][0]["text"]


def cached(target: Target) -> int:
    """Tokens of a conversation's beginning that were there."""
    system = {"role": "system", "content": "You answer in a word or two. " * 4}
    reply = ask(target, "/v1/chat/completions", {"messages": [system, USER], "max_tokens": 1})
    return json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def held(pid: int) -> dict[str, float]:
    """What a process has open, its threads, and its memory in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE)}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"files": files, "threads": numbers["Threads"], "MiB": round(numbers["VmRSS"] / 1024, 1)}


@contextmanager
def served(folder: Path) -> Iterator[tuple[Target, subprocess.Popen[str]]]:
    """`clusterkv serve` of a random model in a process of its own."""
    if not (folder / "demo").exists():
        write_model(folder / "demo")
    sizes = {"slots": 4, "max-tokens": 512, "reserve": 128, "max-body-mib": 4, "shutdown-timeout": 20, "port": 0}
    room = [f"--{name}={size}" for name, size in sizes.items()]
    command = [sys.executable, "-m", "clusterkv_jax", "serve", str(folder / "demo"), *room, "--api-key", KEY]
    log = (folder / "server.log").open("a+")
    with subprocess.Popen([*command, "--context-folder", str(folder)], stderr=log, text=True) as process:
        try:
            while not (found := re.findall(r"http://([\d.]+):(\d+)", (folder / "server.log").read_text())):
                assert process.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.1)
            yield Target(found[-1][0], int(found[-1][1]), process.pid), process
        finally:
            process.kill()


def write_model(folder: Path) -> None:
    """A random model of one layer, with the demo model's tokenizer and a template that knows tools."""
    published = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config = registry.from_hf(published | small)
    params = parameters.init(jax.random.key(0), config)
    loading.save_huggingface(folder, params, config, tokenizer_json=DEMO / "tokenizer.json", dtype="float32")
    about = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def chunk(target: Target, attack: Callable[..., Any], name: str, numbers: range, seed: int, at_once: int) -> Any:
    """Some runs of an attack, each by a seed of its own: how they ended, and what should not be."""

    def one(number: int) -> tuple[str, list[str]]:
        try:
            return attack(target, random.Random(f"{seed} {name} {number}"))
        except (OSError, HTTPException) as error:
            return "broken", [f"{name} {number}: {error!r}"]

    with ThreadPoolExecutor(at_once) as pool:
        ends = list(pool.map(one, numbers))
    found = [fault for _, faults in ends for fault in faults] + settled(target)
    counts = Counter(end for end, _ in ends)
    return {"attack": name, "first": numbers.start, "count": len(numbers), "ends": counts, "faults": found}


def ended() -> list[str]:
    """SIGTERM lets a stream come to its end; after SIGKILL a server starts again and answers as before."""
    found, body = [], {"prompt": "Once", "max_tokens": 100, "stream": True, "ignore_eos": True, "temperature": 0}
    with tempfile.TemporaryDirectory() as folder:
        with served(Path(folder)) as (target, process):
            answer, _ = known(target), cached(target)
            with ThreadPoolExecutor(4) as pool:
                replies = [pool.submit(ask, target, "/v1/completions", body) for _ in range(4)]
                while not json.loads(ask(target, "/status", None).body)["active"]:
                    time.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                found += [] if all(reply.result().body.endswith(b"[DONE]\n\n") for reply in replies) else ["cut short"]
            code = process.wait(60)
            found += [] if code in (0, -signal.SIGTERM) else [f"exit status {code} after SIGTERM"]
            found += [f"{path.name} is left" for path in Path(folder).rglob("*.part")]
        for _ in range(2):
            (Path(folder) / "server.log").unlink()
            with served(Path(folder)) as (target, process):
                found += [] if known(target) == answer else ["another answer after SIGKILL"]
                found += [] if cached(target) else ["contexts of the dead are lost"]
                process.kill()
        found += ["a traceback in the log"] if "Traceback" in (Path(folder) / "server.log").read_text() else []
    return found


def main(
    output: Annotated[
        Path, typer.Option(help="Lines of what was done; those that are there are not done again.")
    ] = Path("attack.jsonl"),
    only: Annotated[str, typer.Option(help="bodies,oversized,keys,disconnects,slow,ends")] = "",
    number: Annotated[int, typer.Option("--bodies", help="Bodies of each endpoint.")] = 10_000,
    left: Annotated[int, typer.Option("--disconnects", help="Clients that leave.")] = 2_000,
    at_once: Annotated[int, typer.Option(help="Clients at the same time.")] = 4,
    seed: int = 0,
) -> None:
    """Attack a server of our own."""
    plan: dict[str, tuple[Callable[..., Any], int]] = {
        f"bodies {path}": (partial(bodies, path=path), number) for path in BODIES
    }
    plan |= {
        "oversized": (oversized, 100),
        "keys": (keys, 1000),
        "disconnects": (disconnects, left),
        "slow": (slow, 10),
    }
    names = set(filter(None, only.split(",")))
    plan = {name: what for name, what in plan.items() if not names or name.split()[0] in names}
    lines = output.read_text().splitlines() if output.exists() else []
    done = {(line["attack"], line["first"]) for line in map(json.loads, lines)}
    found: list[str] = [fault for line in map(json.loads, lines) for fault in line["faults"]]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as (target, process),
        output.open("a") as log,
    ):
        answer = known(target)
        for name, (attack, _) in plan.items():  # what is compiled and kept at the first time is no leak
            chunk(target, attack, name, range(-20, 0), seed, at_once)
        before = held(process.pid)
        chunks = [(first, name, plan[name]) for name in plan for first in range(0, plan[name][1], 500)]
        for first, name, (attack, count) in sorted(chunks, key=lambda chunk: chunk[0]):
            if (name, first) not in done:
                line = chunk(target, attack, name, range(first, min(first + 500, count)), seed, at_once)
                found += line["faults"]
                print(name, first, dict(line["ends"]), *line["faults"][:3], sep=" · ", flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()
        found += [] if known(target) == answer else ["Another answer than at the beginning."]
        said = (Path(folder) / "server.log").read_text()
        found += ["A traceback in the server's log: " + said.partition("Traceback")[2][-600:]] * ("Traceback" in said)
        print("before", before, "after", held(process.pid))
    if not names or "ends" in names:
        found += ended()
    print(f"{len(found)} faults", *found[:20], sep="\n")
    raise typer.Exit(min(len(found), 1))


if __name__ == "__main__":
    typer.run(main)
