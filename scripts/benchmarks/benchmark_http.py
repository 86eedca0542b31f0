"""Times `clusterkv serve` as its clients see it, on a model of random weights.

    python scripts/benchmarks/benchmark_http.py gaps               64 streams, prompts of 1k to 32k that come at random
    python scripts/benchmarks/benchmark_http.py cached compact     a cached context of 64k, and 100,000 tokens compacted
    python scripts/benchmarks/benchmark_http.py overhead --model demo                       milliseconds that HTTP adds

gaps      between pieces of a stream, and the time of all, beside the engine without HTTP on the same arrivals
cached    the time to the first token of a question behind a context that is in the store
compact   `/v1/responses/compact` of a conversation that the server has answered
overhead  a request and a token over HTTP, less the same in the engine, in time and in the server's CPU seconds

The server runs in this process as the command runs it, its clients in another. What compiles is asked once before.
A prompt's tokens are words of a tokenizer that has one for each token; `overhead` takes the model's own, if it has one.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_common import environment
from stages import recorded, stages_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.grid import GridRequest
from clusterkv_jax.benchmark.own_runner import the_model
from clusterkv_jax.blocks.embedding import number_dtype
from clusterkv_jax.engine import SamplingParams
from clusterkv_jax.serve import Server, Settings, bound, make_server, uvicorn_server, warm_up
from clusterkv_jax.serve.prompts import ChatPrompt, of_conversation

NAME, CHAT = "model", "/v1/chat/completions"
ROLES = ("<user>", "<assistant>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant> "
    "{% endif %}"
)
FRAME = 2  # tokens of the template around one message of the user
QUESTION, QUESTIONS = 16, 8  # tokens of a question to a cached context, and how many are timed
# Stages before the first token of a question.
UNTIL_FIRST = ("template and tokens", "context read", "context held", "into its slot", "question", "first token")
GRACE = 20  # seconds after which a part that does not end says where each of its threads is
LONG, ROUNDS, EACH = 65, 12, 8  # tokens of a long answer, rounds of `overhead`, requests of a round


@dataclass(frozen=True)
class Ask:
    """A stream that is asked for: a text, tokens of its answer, and when; None is behind the one before."""

    text: str
    new_tokens: int
    at: float | None = None

    def as_json(self) -> dict[str, Any]:
        """What the client sends."""
        body = {"messages": [{"role": "user", "content": self.text}], "max_completion_tokens": self.new_tokens}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True}
        return {"path": CHAT, "body": body, "at": self.at}


# --- parts ---


def gaps(model: ckv.Model, options: argparse.Namespace) -> Iterator[str]:
    """Streams of prompts that come at random."""
    draw, left = np.random.default_rng(options.seed), time_left(options.limit)
    powers = np.linspace(np.log2(options.shortest), np.log2(options.longest), options.lengths).round().astype(int)
    times = np.cumsum(draw.exponential(1 / options.rate, options.clients))
    asks = [Ask(words(draw, model, 2 ** draw.choice(powers) - FRAME), options.new_tokens, float(at)) for at in times]
    room = {"max_tokens": options.longest + options.new_tokens, "reserve": 4 * options.new_tokens}
    gate = {"reading": options.reading, "window": options.chunk, "chunk": options.chunk}
    with serving(model, options, slots=options.slots, **room, **gate) as (server, port):
        for power in powers.tolist():
            (first,) = over_http(port, [Ask(words(draw, model, 2**power - FRAME), 8).as_json()], left())
            yield f"{2**power:,} tokens: first answer after {first['done']:.1f} s, {compiled(server)}"
        before, speeds = server.served.stats().programs, {}
        yield "\n| | answers | first token, median | gap, median | 99 % | 99.9 % | longest | s | tokens/s |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for name, share in (("HTTP", 0.5), ("engine", 1.0)):
            if name == "HTTP":
                answers = over_http(port, [ask.as_json() for ask in asks], share * left())
            else:
                answers = asyncio.run(directly(server, asks, share * left()))
            begun = [answer for answer in answers if answer["times"]]
            ended = sum("reply" in answer for answer in answers)
            if not begun:
                yield row(name, f"0 of {len(asks)}", *["none"] * 7)
                continue
            between = [gap for answer in begun for gap in np.diff(answer["times"])] or [math.nan]
            first_s = statistics.median(answer["times"][0] - answer["sent"] for answer in begun)
            took = max(answer["done"] for answer in answers) - min(answer["sent"] for answer in answers)
            speeds[name] = read_and_written(asks, answers) / took
            shown = [first_s, *np.quantile(between, (0.5, 0.99, 0.999)), max(between)]
            yield row(name, f"{ended} of {len(asks)}", *map(in_ms, shown), f"{took:.1f}", f"{speeds[name]:,.0f}")
        programs = server.served.stats().programs - before
    if len(speeds) == 2:
        yield f"\nHTTP has {speeds['HTTP'] / speeds['engine']:.1%} of the engine's throughput."
    yield f"\n{programs} programs were compiled meanwhile."


def read_and_written(asks: Sequence[Ask], answers: Sequence[dict[str, Any]]) -> int:
    """Tokens of prompts that came to a first token, and of answers that ended."""
    pairs = list(zip(asks, answers, strict=True))
    read = sum(len(ask.text.split()) + FRAME for ask, answer in pairs if answer["times"])
    return read + sum(ask.new_tokens for ask, answer in pairs if "reply" in answer)


def cached(model: ckv.Model, options: argparse.Namespace) -> Iterator[str]:
    """Questions to a context that is in the store, stage by stage."""
    draw, left = np.random.default_rng(options.seed), time_left(options.limit)
    text = words(draw, model, options.cached)

    def question() -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": part} for part in (text, words(draw, model, QUESTION))]
        blocks[0]["prompt_cache_breakpoint"] = {}
        one = Ask("", 16).as_json()
        usage = {"stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": blocks}]}
        return one | {"body": one["body"] | usage}

    room = {"max_tokens": options.cached + 512, "reserve": 256}
    waited, there, shown = [], 0, UNTIL_FIRST
    with serving(model, options, slots=2, **room) as (server, port), recorded(stages_of(server)) as taken:
        yield table(["question", "first token", *shown, "the rest", "compiled so far"])
        for number in range(2 + QUESTIONS):
            taken.clear()
            (answer,) = over_http(port, [question()], left())
            if "reply" not in answer:
                yield f"\n{ended_after(answer)}: {in_stages(taken)}; {compiled(server)}"
                break
            waited.append(answer["times"][0] - answer["sent"])
            there = answer["reply"]["usage"]["prompt_tokens_details"]["cached_tokens"]
            seconds = [taken[stage] for stage in shown]
            parts = *seconds, waited[-1] - sum(seconds)
            yield row(f"{number + 1}", *map(in_ms, (waited[-1], *parts)), compiled(server))
    if later := waited[2:]:  # the second compiles, where anything does
        yield "\n" + table(["context", "cached", "median to the first token behind it", "longest"])
        yield row(f"{options.cached:,}", f"{there:,}", in_ms(statistics.median(later)), in_ms(max(later)))


def compact(model: ckv.Model, options: argparse.Namespace) -> Iterator[str]:
    """A conversation that is compacted, stage by stage; the first, a short one, compiles."""
    draw, left = np.random.default_rng(options.seed), time_left(options.limit)
    room = {"max_tokens": options.compacted + 512, "reserve": 256}
    with serving(model, options, slots=2, **room) as (server, port), recorded(stages_of(server)) as taken:
        for tokens in (options.compacted // 8, options.compacted, options.compacted):
            said = {"input": words(draw, model, tokens), "max_output_tokens": 8, "temperature": 0}
            taken.clear()
            (answer,) = over_http(port, [{"path": "/v1/responses", "body": said, "at": None}], left())
            yield f"\n{tokens:,} tokens: {ended_after(answer)}: {in_stages(taken)}; {compiled(server)}"
            if "reply" not in answer:
                return
            what = {"previous_response_id": answer["reply"]["id"]}
            taken.clear()
            (done,) = over_http(port, [{"path": "/v1/responses/compact", "body": what, "at": None}], left())
            yield f"compacted: {ended_after(done)}: {in_stages(taken)}; {compiled(server)}"
            if "reply" not in done:
                return
            usage = done["reply"]["usage"]
            again = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
            yield f"{usage['input_tokens']:,} tokens, of which {again:,} were read for it"


def overhead(model: ckv.Model, options: argparse.Namespace) -> Iterator[str]:
    """Streams of one token and of many, one after the other, over HTTP and in the engine by turns. What is added is the
    median of the rounds' differences: another program slows both sides of a round.
    """
    draw = np.random.default_rng(options.seed)
    room = {"max_tokens": 512, "reserve": 2 * LONG}
    rounds = []  # of each: seconds and CPU seconds of a request, by its new tokens and its side
    with serving(model, options, slots=2, **room) as (server, port):
        for _ in range(1 + ROUNDS):
            rounds.append(np.zeros((2, 2, 2)))
            for (i, new), (j, side) in itertools.product(enumerate((1, LONG)), enumerate(("HTTP", "engine"))):
                asks = [Ask(words(draw, model, 32), new) for _ in range(EACH)]  # none is in the store
                before = time.process_time()
                if side == "HTTP":
                    answers = over_http(port, [ask.as_json() for ask in asks])
                else:
                    answers = asyncio.run(directly(server, asks))
                took = statistics.median(answer["done"] - answer["sent"] for answer in answers)
                rounds[-1][i, j] = took, (time.process_time() - before) / EACH
    one, many = np.moveaxis(np.stack(rounds[1:]), 1, 0)  # the first compiles
    yield table(("", "HTTP", "engine", "added", "HTTP, CPU", "engine, CPU", "added"))
    for name, seconds in (("a request of one token", one), ("each further token", (many - one) / (LONG - 1))):
        shown = np.median([*np.moveaxis(seconds, 1, 0), seconds[:, 0] - seconds[:, 1]], axis=1)
        yield row(name, *map(in_ms, shown.T.flat))


# --- the server and its clients ---


@contextlib.contextmanager
def serving(model: ckv.Model, options: argparse.Namespace, **room: Any) -> Iterator[tuple[Server, int]]:
    """A server and its port, ready to answer."""
    begin = time.perf_counter()
    server = make_server(model, Settings(NAME), method=options.method, ratio=options.ratio, **room)
    warm_up(server)
    print(f"A server of {room['max_tokens']:,} tokens is ready after {time.perf_counter() - begin:.1f} s\n", flush=True)
    with bound("127.0.0.1", 0) as listener:
        told = uvicorn_server(server)
        thread = threading.Thread(target=told.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server, listener.getsockname()[1]
        finally:
            told.should_exit = True
            thread.join()


def over_http(port: int, asks: Sequence[dict[str, Any]], limit: float = 1e6) -> list[dict[str, Any]]:
    """What comes of requests within so many seconds, by clients in another process. Raises CalledProcessError where one
    fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("http_client.py"))]
    plan = json.dumps({"port": port, "limit": limit, "asks": list(asks)})
    done = subprocess.run(command, input=plan, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


async def directly(server: Server, asks: Sequence[Ask], limit: float = 1e6) -> list[dict[str, Any]]:
    """The same streams in the engine, without HTTP. It gets the tokens that the server makes, and its prompts and
    answers are left as contexts too.
    """
    begin = time.perf_counter()
    said = [ChatPrompt([{"role": "user", "content": ask.text}]) for ask in asks]
    prompts = [of_conversation(server.model, each).tokens for each in said]
    left = deque[Any](maxlen=server.settings.shared_contexts)  # what the server's store would hold

    async def one(ask: Ask, prompt: list[int]) -> dict[str, Any]:
        if ask.at is not None:
            await asyncio.sleep(begin + ask.at - time.perf_counter())
        sent = time.perf_counter()
        params = SamplingParams(max_tokens=ask.new_tokens, ignore_eos=True)
        request = server.engine.request(prompt, params=params, stream=True, keep=True)
        request = replace(request, keep_prompt=True)
        told: dict[str, Any] = {"sent": sent, "times": []}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(begin + limit - sent):
                async for output in server.served.submit(request):
                    told["times"].append(time.perf_counter())
                    left.extend(context for context in (output.prompt_context, output.context) if context is not None)
            told["reply"] = None
        return told | {"done": time.perf_counter()}

    pairs = list(zip(asks, prompts, strict=True))
    if all(ask.at is not None for ask in asks):
        begin = time.perf_counter()
        return await asyncio.gather(*(one(*pair) for pair in pairs))
    return [await one(*pair) for pair in pairs]


# --- models and tables ---


def words(draw: np.random.Generator, model: ckv.Model, count: int) -> str:
    """A text of so many random words, each of which is a token."""
    return " ".join(f"w{number}" for number in draw.integers(0, model.config.vocab_size - 3, count))


def with_words(model: ckv.Model) -> ckv.Model:
    """The model with a tokenizer of words."""
    names = [f"w{number}" for number in range(model.config.vocab_size - 3)] + [*ROLES, "<unk>"]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return replace(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE))


def table(names: Sequence[str]) -> str:
    """The head of a table."""
    return f"{row(*names)}\n|{'---|' * len(names)}"


def in_stages(taken: Mapping[str, float]) -> str:
    """What was recorded, in one line."""
    return ", ".join(f"{stage} {in_ms(seconds)}" for stage, seconds in sorted(taken.items())) or "nothing"


def ended_after(answer: Mapping[str, Any]) -> str:
    """How long an answer took, or that it was cut off."""
    return f"{'answered' if 'reply' in answer else 'cut off'} after {in_ms(answer['done'] - answer['sent'])}"


def compiled(server: Server) -> str:
    """What the engine has compiled."""
    stats = server.served.stats()
    return f"{stats.programs} programs in {stats.compile_s:.1f} s"


def time_left(limit: float) -> Callable[[], float]:
    """The seconds that a part has left, at least one."""
    end = time.monotonic() + limit
    return lambda: max(1.0, end - time.monotonic())


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def in_ms(seconds: float) -> str:
    """Seconds, as milliseconds."""
    return f"{seconds * 1e3:.3g} ms"


def main() -> None:
    """Print the tables."""
    parts = {"gaps": gaps, "cached": cached, "compact": compact, "overhead": overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="what is timed [all]")
    parser.add_argument("--model", default="llama-3.1-8b", help="'demo', a packaged shape, or a folder")
    parser.add_argument("--weights", choices=["int8", "int4"], help="weights of layers in codes [as numbers]")
    parser.add_argument("--method", default="auto", help="a preset that takes a budget")
    parser.add_argument("--ratio", type=float, default=0.125, help="share of the rows")
    parser.add_argument("--clients", type=int, default=64, help="requests of `gaps`, each a client's")
    parser.add_argument("--rate", type=float, default=4.0, help="of them in a second, on average")
    parser.add_argument("--slots", type=int, default=64, help="of the engine in `gaps`")
    parser.add_argument("--shortest", type=int, default=1024, help="tokens of a prompt of `gaps`, a power of two")
    parser.add_argument("--longest", type=int, default=32768, help="likewise")
    parser.add_argument("--lengths", type=int, default=6, help="of prompts of `gaps`, each of which compiles")
    parser.add_argument("--limit", type=float, default=300, help="seconds of each part; what has not ended is cut off")
    parser.add_argument("--reading", default="whole", choices=("whole", "gated"), help="of prompts of `gaps`")
    parser.add_argument("--chunk", type=int, default=2048, help="gated, tokens that are read at once, and the window")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer of `gaps`")
    parser.add_argument("--cached", type=int, default=65536, help="tokens of the context of `cached`")
    parser.add_argument("--compacted", type=int, default=100_000, help="tokens of the conversation of `compact`")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and words")
    options = parser.parse_args()
    most = max(options.longest, options.cached, options.compacted)
    request = GridRequest(options.model, (), (most,), (1,), (), 1, 1024, None, weights=options.weights)
    model = the_model(request)
    held = options.weights or number_dtype(model.params)
    print(f"{environment()}, {options.model}, {held}, {options.method} {options.ratio:.3g}")
    for name in options.parts or parts:
        own = name == "overhead" and model.tokenizer is not None
        begin = time.perf_counter()
        faulthandler.dump_traceback_later(options.limit + GRACE, exit=True)
        print(f"\n{name}\n", flush=True)
        for line in parts[name](model if own else with_words(model), options):
            print(line, flush=True)
        faulthandler.cancel_dump_traceback_later()
        print(f"\n{name} took {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
